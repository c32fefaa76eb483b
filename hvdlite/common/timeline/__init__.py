"""The timeline: what the engine did when, as a file in the Chrome trace format."""
