"""Buckets of gradients, and how an optimizer reduces them."""
