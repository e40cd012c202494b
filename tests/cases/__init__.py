"""Small programs of paths that people reported: each prepares, then does the one thing that is measured."""
