"""The transport over TCP between hosts; inside a host, sockets and shared memory."""
