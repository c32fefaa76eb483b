"""Hosts: which there are, how ssh reaches them, and whether a job can run on them."""
