"""What is known about copies by other means than copytrace's own."""
