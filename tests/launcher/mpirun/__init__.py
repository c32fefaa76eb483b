"""Tests of ranks that an mpirun starts."""
