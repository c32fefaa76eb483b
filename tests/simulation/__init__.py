"""Whole jobs on a clock, processes and connections that a seed decides: see docs/simulation.md."""
