"""Collectives among several hosts: shared memory inside each, few messages between them."""
