"""A worker: its tables, which lie on the servers, and its connections with each of them."""
