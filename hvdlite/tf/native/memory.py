"""Memory of TensorFlow's as numpy arrays."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np

from hvdlite.common.plain.numpy_adapter import Array

READ, READ_AND_WRITE = 0x100, 0x200  # PyBUF_READ, PyBUF_WRITE

_memory: Any = ctypes.pythonapi.PyMemoryView_FromMemory
_memory.restype = ctypes.py_object
_memory.argtypes = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int


def array_at(address: int, shape: tuple[int, ...], dtype: Any, access: int) -> Array:
    """Return the array at an address, which must not be used longer than the memory exists."""
    size_bytes = math.prod(shape) * dtype.itemsize
    if size_bytes == 0:
        return np.empty(shape, dtype)
    if not address:
        raise MemoryError(f"no memory for a tensor of {size_bytes} bytes")
    return np.frombuffer(_memory(address, size_bytes, access), dtype).reshape(shape)
