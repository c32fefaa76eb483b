"""init and shutdown, process sets, rank and size: the only module-level state."""
