"""The adapter for torch's tensors, by which the packages below see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from hvdlite.common.tensors.adapter import COMPLEX, HOST_DEVICE, HostBuffer, Place, TensorSpec
from hvdlite.common.tensors.numpy_adapter import read_splits
from hvdlite.torch.devices import Device, HostDevice, find_device
from hvdlite.torch.dtypes import DTYPE_NAMES

_increment_version = torch.autograd.graph.increment_version


def _increment_one_by_one(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        _increment_version(tensor)


# Lets autograd know that tensors have changed.
increment_versions: Callable[[Sequence[torch.Tensor]], None]
try:
    _increment_version([])
except (RuntimeError, TypeError):  # Before PyTorch 2.5.
    increment_versions = _increment_one_by_one
else:
    increment_versions = _increment_version
# A tensor of a subclass may keep its values elsewhere.
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))


class TorchAdapter:
    """The adapter for tensors of any dtype of numpy and ml_dtypes, on the host or a GPU.

    `find` returns the device for a torch device type; tests replace it.
    """

    def __init__(self, find: Callable[[str], Device] = find_device) -> None:
        self._find = cache(find)
        self._host = find("cpu")
        self._host_is_memory = isinstance(self._host, HostDevice)

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """Return dtype, shape and device. Raises `ValueError` for unsupported tensors."""
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"a torch.Tensor is needed, not {type(tensor).__name__} {tensor!r}")
        if tensor.layout is not torch.strided:
            raise ValueError(
                f"Tensor layout {tensor.layout} is not supported here: use "
                "sparse_allreduce_async, or a dense tensor (tensor.to_dense())"
            )
        name = DTYPE_NAMES.get(tensor.dtype)
        if name is None:
            raise ValueError(
                f"Tensor type {tensor.dtype} is not supported: convert the tensor to one of "
                f"{', '.join(DTYPE_NAMES.values())}"
            )
        return TensorSpec(name, tuple(tensor.shape), self._device(tensor).name)

    def place(self, tensor: torch.Tensor, spec: TensorSpec) -> Place | None:
        """Return the memory of a tensor of the host that has this dtype and shape."""
        if (
            type(tensor) in _PLAIN
            and tensor.is_cpu
            and self._host_is_memory
            and tensor.layout is torch.strided
            and tensor.shape == spec.shape
            and DTYPE_NAMES.get(tensor.dtype) == spec.dtype
            and spec.device == HOST_DEVICE
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not (spec.dtype in COMPLEX and tensor.is_conj())
        ):
            return tensor.data_ptr(), tensor.untyped_storage()
        return None

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the tensor's values, in its own memory where possible."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        return self._device(tensor).input(tensor)

    def empty_like(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor of this dtype and device, with its strides if it has this shape."""
        return self._device(tensor).empty(tensor, shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return a buffer that `commit` copies into the tensor, its own memory where possible.

        Raises `ValueError` where elements of the tensor share memory.
        """
        if not tensor.is_contiguous() and _overlaps(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} whose elements share memory (by expand, "
                "perhaps) cannot be written in place: give a clone"
            )
        return self._device(tensor).output(tensor)

    def read_splits(self, splits: Any) -> list[int]:
        """Return splits from an int32 tensor, or from a list."""
        if not isinstance(splits, torch.Tensor):
            return read_splits(np.asarray(splits))
        if splits.dtype is not torch.int32:
            raise ValueError(f"splits must be int32, not {splits.dtype}: use splits.int()")
        return read_splits(splits.cpu().numpy())

    def make_splits(self, splits: Sequence[int], like: Any) -> torch.Tensor:
        """Return an int32 tensor, on the device of the splits `like` that the user gave."""
        device = like.device if isinstance(like, torch.Tensor) else None
        return torch.tensor(splits, dtype=torch.int32, device=device)

    def finish(self, tensor: torch.Tensor) -> None:
        """Tell the device's current stream and autograd that the tensor was written.

        See [Note: views and version counters] in torch/optimizer/flat_gradients.py.
        """
        if not (tensor.is_cpu and self._host_is_memory):
            self._device(tensor).finish(tensor)
        if not tensor.is_inference():
            _increment_version(tensor)

    def finish_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """Do as `finish` does for several tensors, in one call where they are on the host."""
        written = [tensor for tensor in tensors if tensor.is_cpu and not tensor.is_inference()]
        if len(written) < len(tensors) or not self._host_is_memory:
            for tensor in tensors:
                self.finish(tensor)
        else:
            increment_versions(written)

    def _device(self, tensor: torch.Tensor) -> Device:
        return self._host if tensor.is_cpu else self._find(tensor.device.type)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Return whether elements share memory, as after expand."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(stride == 0 and length > 1 for length, stride in strides)
