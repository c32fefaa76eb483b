"""Random jobs of a parameter server, of which anything is killed, stopped, added and taken away."""
