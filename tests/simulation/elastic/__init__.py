"""Elastic jobs: the real driver."""
