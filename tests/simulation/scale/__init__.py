"""Jobs of thousands of ranks."""
