"""What goes between hosts: algorithms as data, what they cost, and what runs them."""
