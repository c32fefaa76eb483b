"""Tests on several hosts, which namespaces of this machine simulate: `lab.py` says how."""
