"""The addresses of TensorFlow's tensors, by DLPack."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int32, c_int64, c_uint8, c_uint16, c_uint64, c_void_p
from typing import Any, NamedTuple

import tensorflow as tf


class _Tensor(ctypes.Structure):
    """The beginning of a ``DLManagedTensor``, which is a ``DLTensor``."""

    _fields_ = (
        ("data", c_void_p),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("dimensions", c_int32),
        ("code", c_uint8),
        ("bits", c_uint8),
        ("lanes", c_uint16),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    )


_pointer_of: Any = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = c_void_p
_pointer_of.argtypes = ctypes.py_object, ctypes.c_char_p


class Lent(NamedTuple):
    """The memory of a tensor, which exists as long as `capsule` does."""

    address: int
    capsule: Any


def lend(tensor: tf.Tensor) -> Lent:
    """Return the memory of an eager tensor, whose values are there when this returns.

    Raises `tf.errors.InvalidArgumentError` for a dtype that DLPack has not.
    """
    capsule = tf.experimental.dlpack.to_dlpack(tensor)
    described = _Tensor.from_address(_pointer_of(capsule, b"dltensor"))
    return Lent((described.data or 0) + described.byte_offset, capsule)
