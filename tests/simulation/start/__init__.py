"""How the ranks of a job meet and prove themselves."""
