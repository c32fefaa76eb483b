"""The scheduler: who is there, who keeps what, and whose turn it is. It sees no tensor."""
