"""A server: serves its share of the tables, and saves, loads, sends and takes them."""
