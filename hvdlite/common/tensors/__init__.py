"""Tensors of any framework: what an adapter tells of them, compression, and those of numpy."""
