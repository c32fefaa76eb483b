"""The engine thread of a rank: drain, negotiate, run, complete."""
