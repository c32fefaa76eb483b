"""Which gradients travel together: strategies that cut a list of gradients into segments."""
