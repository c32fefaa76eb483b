"""Collectives on TensorFlow's tensors: run now, or put into the graph that is being built."""
