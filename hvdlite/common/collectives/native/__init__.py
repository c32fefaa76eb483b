"""Compiled collectives inside a host: shipped in wheels, or built on the machine of the user."""
