"""Plain data: messages, settings, entries, handles, and the adapter for numpy arrays."""
