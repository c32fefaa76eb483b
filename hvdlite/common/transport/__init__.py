"""Bytes move here and only here: control messages, shared memory, and arrays between ranks."""
