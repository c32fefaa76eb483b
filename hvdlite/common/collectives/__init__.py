"""The table of collectives, and the backends that run them."""
