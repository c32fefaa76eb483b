"""Tests of agents, and of their connections with the launcher."""
