"""Messages and their ways: connections that prove themselves, and memory that a host shares."""
