"""hvdlite for Keras."""
