"""What no framework needs to know: engine, collectives, transports and plain data."""
