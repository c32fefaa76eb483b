"""Elastic jobs: workers come and go, and the others train on."""
