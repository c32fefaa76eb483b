"""Scenarios of elastic training: real jobs whose workers die at named places."""
