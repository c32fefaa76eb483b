"""The connection between a worker of an elastic job and its driver."""
