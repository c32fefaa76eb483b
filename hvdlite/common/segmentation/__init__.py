"""Segmentation: which gradients are reduced together, as the user chooses or as is measured."""
