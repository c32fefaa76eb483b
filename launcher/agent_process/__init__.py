"""The agent: the process that starts the ranks of one host, and what it does there."""
