"""Elastic scripts as users of Horovod write them."""
