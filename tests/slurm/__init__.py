"""Tests with real Slurm: a small cluster on this machine."""
