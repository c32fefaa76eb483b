"""Checkpoints of tensors that are cut among ranks: written by any number, read by any other.

A checkpoint is a folder: one file of safetensors for each rank that wrote it, and layout.json,
which says for each tensor how it was cut. The modules `checkpoint` of hvdlite.numpy, .torch, .tf
and .keras are its public forms.
"""
