"""Compiled TensorFlow operations, built on the user's machine."""
