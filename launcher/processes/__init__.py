"""What the launcher has to do with any process: its output, its signals, waiting for its end."""
