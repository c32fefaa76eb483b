"""Backends for several hosts: shared memory inside each, few messages between them."""
