"""The adapter for numpy arrays: those of hvdlite.numpy, and host views of other tensors."""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.tensors.adapter import HOST_DEVICE, CpuBuffer, HostBuffer, Place, TensorSpec
from hvdlite.common.tensors.result_memory import result_memory

Array = NDArray[Any]

ALIGNMENT_BYTES = 64  # The widest vector instructions and TensorFlow's tensors need it.
_no_bytes_of: Any = (ctypes.c_char * 0).from_buffer  # The beginning of a buffer.


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Allocate an array whose memory begins at a multiple of `ALIGNMENT_BYTES`."""
    size_bytes = math.prod(shape) * dtype.itemsize
    memory = np.empty(size_bytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    return memory[start : start + size_bytes].view(dtype).reshape(shape)


def read_splits(splits: Array) -> list[int]:
    """Return splits as ints. Raises `ValueError` unless they are one row of integers."""
    if splits.ndim != 1:
        raise ValueError(f"splits must be 1-dimensional, not of shape {splits.shape}")
    if splits.size and not np.issubdtype(splits.dtype, np.integer):
        raise ValueError(f"splits must be integers (int32), not {splits.dtype}")
    return [int(split) for split in splits]


@functools.cache
def _has_buffer(dtype: np.dtype[Any]) -> bool:
    """Return whether arrays of this dtype are buffers: numpy describes no others, as bfloat16."""
    try:
        _no_bytes_of(np.empty(1, dtype))
    except ValueError:
        return False
    return True


@functools.cache
def _name(dtype: np.dtype[Any]) -> str:
    if not dtype.isnative:
        raise ValueError(
            f"Tensor type {dtype.str} is not supported: its bytes are in the order of "
            "another machine; convert it with astype(dtype.newbyteorder('='))"
        )
    return str(dtype.name)


class _CopiedBuffer(CpuBuffer):
    """The output buffer of an array that is not contiguous and aligned."""

    __slots__ = ("_target",)

    def __init__(self, target: Array) -> None:
        super().__init__(np.empty(target.size, target.dtype))
        self._target = target

    def commit(self) -> None:
        self._target[...] = self.array.reshape(self._target.shape)


class NumpyAdapter:
    """numpy arrays, and everything that ``numpy.asarray`` converts."""

    def spec(self, tensor: Array) -> TensorSpec:
        """Return dtype, shape and device; a number or a list is an array too."""
        array = np.asarray(tensor)
        return TensorSpec(_name(array.dtype), array.shape, HOST_DEVICE)

    def place(self, tensor: Array, spec: TensorSpec) -> Place | None:
        """Return the memory of an array that has this dtype and shape, and can be written to."""
        if (
            type(tensor) is np.ndarray
            and tensor.shape == spec.shape
            and tensor.flags.carray
            and _name(tensor.dtype) == spec.dtype
        ):
            if _has_buffer(tensor.dtype):  # In a third of the time that numpy takes to describe it.
                return ctypes.addressof(_no_bytes_of(tensor)), tensor
            return tensor.__array_interface__["data"][0], tensor
        return None

    def input(self, tensor: Array) -> HostBuffer:
        """Return the memory of the array, or a copy if it is not contiguous and aligned."""
        array = np.ascontiguousarray(tensor)
        return CpuBuffer((array if array.flags.aligned else array.copy()).reshape(-1))

    def empty_like(self, tensor: Array, shape: tuple[int, ...]) -> Array:
        """Allocate an array, aligned for every kernel; see `result_memory`."""
        dtype = np.asarray(tensor).dtype
        memory = result_memory.lend(math.prod(shape) * dtype.itemsize)
        if memory is None:
            return aligned_empty(shape, dtype)
        return memory.view(dtype).reshape(shape)

    def output(self, tensor: Array) -> HostBuffer:
        """Return the memory of the array, or a buffer if it is not contiguous and aligned."""
        if not isinstance(tensor, np.ndarray) or not tensor.flags.writeable:
            kind = "a read-only one" if isinstance(tensor, np.ndarray) else str(type(tensor))
            raise ValueError(f"only a numpy array can be written in place, not {kind}")
        tensor = np.asarray(tensor)  # A matrix would keep two dimensions.
        return CpuBuffer(tensor.reshape(-1)) if tensor.flags.carray else _CopiedBuffer(tensor)

    def read_splits(self, splits: Any) -> list[int]:
        """Return splits, from a list or an array, as ints."""
        return read_splits(np.asarray(splits))

    def make_splits(self, splits: Sequence[int], like: Any) -> Array:
        """Return an array of the dtype of `like` (int32: it is no array), or int64 if need be."""
        dtype = like.dtype if isinstance(like, np.ndarray) else np.dtype(np.int32)
        return np.array(splits, dtype if max(splits) <= np.iinfo(dtype).max else np.int64)

    def finish(self, tensor: Array) -> None:
        """Do nothing: host memory needs no ordering."""

    def finish_all(self, tensors: Sequence[Array]) -> None:
        """Do nothing: host memory needs no ordering."""
