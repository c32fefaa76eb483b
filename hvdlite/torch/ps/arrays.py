"""Tensors of PyTorch on the CPU as arrays of numpy, and back, without copies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import torch

from hvdlite.ps.blocks import Array


def array_of(tensor: torch.Tensor) -> Array:
    """Return a flat array that shares the memory of a contiguous tensor."""
    tensor = tensor.detach()
    flat = tensor if tensor.dim() == 0 else tensor.reshape(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return flat.numpy()


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, which is copied if it is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
