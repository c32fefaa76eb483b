"""Errors, warnings, sets of integers, the topology: what every package may import."""
