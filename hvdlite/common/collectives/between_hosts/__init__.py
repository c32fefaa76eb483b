"""Allreduce between hosts: its algorithms as data, what they cost, and what runs them."""
