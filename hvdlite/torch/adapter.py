"""torch's tensors, as the floors below see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from hvdlite.common.plain.adapter import HostBuffer, TensorSpec
from hvdlite.common.plain.numpy_adapter import read_splits
from hvdlite.torch.devices import Device, find_device
from hvdlite.torch.dtypes import DTYPE_NAMES


class TorchAdapter:
    """Tensors of any dtype that numpy or ml_dtypes has too, on the host or on an accelerator.

    `find` gives the device of a torch device type; tests put in one of their own.
    """

    def __init__(self, find: Callable[[str], Device] = find_device) -> None:
        self._find = cache(find)
        self._host = find("cpu")

    def spec(self, tensor: torch.Tensor) -> TensorSpec:
        """dtype, shape and device. Raises `ValueError` for what no collective takes."""
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

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """The tensor's values, its own memory where possible."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        return self._device(tensor).input(tensor)

    def empty_like(self, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A new tensor of the same dtype and device; in the same layout where it has the shape."""
        return self._device(tensor).empty(tensor, shape)

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """A buffer that `commit` carries into the tensor, its own memory where possible.

        Raises `ValueError` where elements of the tensor share memory.
        """
        if not tensor.is_contiguous() and _overlaps(tensor):
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} whose elements share memory (by expand, "
                "perhaps) cannot be written in place: give a clone"
            )
        return self._device(tensor).output(tensor)

    def read_splits(self, splits: Any) -> list[int]:
        """Splits from an int32 tensor, or a list."""
        if not isinstance(splits, torch.Tensor):
            return read_splits(np.asarray(splits))
        if splits.dtype is not torch.int32:
            raise ValueError(f"splits must be int32, not {splits.dtype}: use splits.int()")
        return read_splits(splits.cpu().numpy())

    def make_splits(self, splits: Sequence[int], like: Any) -> torch.Tensor:
        """An int32 tensor, on the device of the splits that were given."""
        device = like.device if isinstance(like, torch.Tensor) else None
        return torch.tensor(splits, dtype=torch.int32, device=device)

    def finish(self, tensor: torch.Tensor) -> None:
        """The tensor was written, unseen by autograd and by the device's current stream."""
        self._device(tensor).finish(tensor)
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)

    def _device(self, tensor: torch.Tensor) -> Device:
        return self._host if tensor.is_cpu else self._find(tensor.device.type)


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as after expand."""
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() > 0 and any(stride == 0 and length > 1 for length, stride in strides)
