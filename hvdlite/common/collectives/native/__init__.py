"""Compiled code for allreduce inside a host, built on the user's machine."""
