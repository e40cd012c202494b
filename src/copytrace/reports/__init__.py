"""Renderings of a report: each takes data and returns a string, nothing else."""
