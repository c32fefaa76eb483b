"""Jobs of the parameter server: its scheduler, servers and workers."""
