"""Tensors of PyTorch on the CPU as arrays of numpy, and back, without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
import torch

from hvdlite.ps.layouts.blocks import Array

_OF_NUMPY = (torch.float32, torch.float64, torch.float16)


def array_of(tensor: torch.Tensor) -> Array:
    """Return an array that shares the memory of a contiguous tensor: flat, or of a scalar."""
    tensor = tensor.detach()
    flat = tensor if tensor.dim() == 0 else tensor.reshape(-1)
    if flat.dtype == torch.bfloat16:
        return flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return flat.numpy()


def flat_array_of(tensor: torch.Tensor) -> Array:
    """Return a flat array of a tensor from any device, which shares its memory where that can be.

    It does for tensors in contiguous memory of the host.
    """
    if tensor.dtype in _OF_NUMPY and not tensor.requires_grad and is_plain(tensor):
        array: Array = tensor.numpy().reshape(-1)  # In a fifth of the time of the way below.
        return array
    return array_of(tensor.detach().to("cpu").contiguous()).reshape(-1)


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, which is copied if it is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor lies in contiguous memory of the host."""
    return tensor.device.type == "cpu" and tensor.is_contiguous()


class Target:
    """Where the values of a parameter are written: its own memory, or a copy on the host."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter = parameter
        self._address = parameter.data_ptr()
        plain = is_plain(parameter)
        host = parameter.detach() if plain else torch.empty_like(parameter, device="cpu")
        self._staged = None if plain else host
        self.array = array_of(host).reshape(-1)

    def holds(self) -> bool:
        """Return whether the parameter still lies where it lay."""
        return self._parameter.data_ptr() == self._address

    @staticmethod
    def finish(targets: Sequence[Target]) -> None:
        """Bring the values to the parameters, after they were written."""
        for each in targets:
            if each._staged is not None:
                each._parameter.copy_(each._staged)
        _note_changes([each._parameter for each in targets if each._staged is None])


def _note_changes(tensors: Sequence[torch.Tensor]) -> None:
    """Let autograd know that tensors have changed, at once where PyTorch takes several."""
    increment: Any = torch.autograd.graph.increment_version
    try:
        increment(tensors)
    except TypeError:  # Before PyTorch 2.5.
        for tensor in tensors:
            increment(tensor)


def matrix_of(tensor: Any) -> Array:
    """Return an array of the shape of a tensor, from any device, or of what numpy takes."""
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    return array_of(tensor.detach().to("cpu").contiguous()).reshape(tensor.shape)


def shaped_tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor of the shape of an array, which shares its memory if that is writable."""
    return tensor_of(array.reshape(-1)).reshape(array.shape)
