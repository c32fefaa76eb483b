"""Messages and their ways: ZeroMQ, memory that processes of a host share, and who may send."""
