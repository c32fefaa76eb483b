"""Layouts of tensors that are cut among ranks: who holds what, and who needs it. Pure."""
