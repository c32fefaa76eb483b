"""Tensors of PyTorch on the CPU as arrays of numpy, and back, without copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hvdlite.ps.layouts.blocks import Array
from hvdlite.torch.adapter import increment_versions
from hvdlite.torch.dtypes import as_array, as_tensor

_OF_NUMPY = (torch.float32, torch.float64, torch.float16)


def flat_array_of(tensor: torch.Tensor) -> Array:
    """Return a flat array of a tensor from any device, which shares its memory where that can be.

    It does for tensors in contiguous memory of the host.
    """
    if tensor.dtype in _OF_NUMPY and not tensor.requires_grad and is_plain(tensor):
        array: Array = tensor.numpy().reshape(-1)  # In a fifth of the time of the way below.
        return array
    return as_array(tensor.detach().to("cpu").contiguous())


def tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor that shares the memory of an array, which is copied if it is read-only."""
    return as_tensor(array if array.flags.writeable else array.copy())


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
        self.array = as_array(host)

    def holds(self) -> bool:
        """Return whether the parameter still lies where it lay."""
        return self._parameter.data_ptr() == self._address

    @staticmethod
    def finish(targets: Sequence[Target]) -> None:
        """Bring the values to the parameters, after they were written."""
        for each in targets:
            if each._staged is not None:
                each._parameter.copy_(each._staged)
        increment_versions([each._parameter for each in targets if each._staged is None])


def matrix_of(tensor: Any) -> Array:
    """Return an array of the shape of a tensor, from any device, or of what numpy takes."""
    if not isinstance(tensor, torch.Tensor):
        return np.asarray(tensor)
    return as_array(tensor.detach().to("cpu").contiguous()).reshape(tensor.shape)


def shaped_tensor_of(array: Array) -> torch.Tensor:
    """Return a tensor of the shape of an array, which shares its memory if that is writable."""
    return tensor_of(array.reshape(-1)).reshape(array.shape)
