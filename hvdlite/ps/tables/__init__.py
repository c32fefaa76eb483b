"""A table on one server: its values, what is pushed to them, and what is answered."""
