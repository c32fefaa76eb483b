"""The compiled functions by which programs of XLA run collectives."""
