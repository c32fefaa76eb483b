"""Jobs of ranks: real engines."""
