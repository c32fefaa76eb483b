"""A job from its start to its outcome, however its ranks are started."""
