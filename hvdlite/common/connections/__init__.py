"""Connections between processes: proven, framed, watched, and driven by one loop."""
