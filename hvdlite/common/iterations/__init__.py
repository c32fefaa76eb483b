"""What ranks do in each training iteration, counted: a trace, metrics, and who is slow."""
