"""The memory of the host as a device: its tensors are read and written where they are."""

from __future__ import annotations

import math

import torch

from hvdlite.common.plain.adapter import HOST_DEVICE, CpuBuffer, HostBuffer, numpy_dtype
from hvdlite.common.plain.result_memory import result_memory
from hvdlite.torch.dtypes import DTYPE_NAMES, as_array, as_tensor


def new_tensor(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor without values. One of the shape of `like` has its strides.

    torch's own results have them too. A gradient with other strides than its weights is wrong for
    kernels that treat both as flat memory.
    """
    if like.shape == shape and not like.is_contiguous():
        return torch.empty_like(like.detach())
    return torch.empty(shape, dtype=like.dtype, device=like.device)


class HostDevice:
    """The memory of the host: only tensors that are not contiguous are copied."""

    name = HOST_DEVICE

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the tensor's own memory, or a copy of one that is not contiguous."""
        return CpuBuffer(as_array(tensor.contiguous()))

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor; see `result_memory`."""
        if like.shape == shape and not like.is_contiguous():
            return new_tensor(like, shape)
        memory = result_memory.lend(math.prod(shape) * like.itemsize)
        if memory is None:
            return new_tensor(like, shape)
        return as_tensor(memory.view(numpy_dtype(DTYPE_NAMES[like.dtype]))).view(shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the tensor's own memory, or a buffer for one that is not contiguous."""
        if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
            return CpuBuffer(as_array(tensor))
        return _ScatteredBuffer(tensor)

    def finish(self, tensor: torch.Tensor) -> None:
        """Do nothing: host memory needs no ordering."""


class _ScatteredBuffer(CpuBuffer):
    """The output for a host tensor that is not contiguous, or lazily conjugated."""

    __slots__ = ("_host", "_target")

    def __init__(self, target: torch.Tensor) -> None:
        self._target = target
        self._host = torch.empty(target.shape, dtype=target.dtype)
        super().__init__(as_array(self._host))

    def commit(self) -> None:
        # The version of the tensor must not change before `finish`.
        # See [Note: views and version counters] in torch/flat_gradients.py.
        self._target.data.copy_(self._host)
