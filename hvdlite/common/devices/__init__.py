"""Collectives in the memory of accelerators, by the libraries of their vendors."""
