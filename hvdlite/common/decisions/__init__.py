"""Decisions of the control plane, without I/O, clocks or threads."""
