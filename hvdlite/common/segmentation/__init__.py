"""Segmentation: which gradients are reduced together, set by the user or tuned by measuring."""
