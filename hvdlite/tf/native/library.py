"""The compiled operations as Python calls them."""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import tensorflow as tf

from hvdlite.tf.accelerators.library import Accelerator, addresses
from hvdlite.tf.errors import GENERATED


class Library:
    """The compiled operations, and the C functions beside them."""

    def __init__(self, path: str) -> None:
        operations: Any = tf.load_op_library(path)
        self.start, self.take = _named(operations.hvdlite_start), _named(operations.hvdlite_take)
        waiting = ctypes.CDLL(path)  # Its functions are called without the GIL.
        quick = ctypes.PyDLL(path)
        integers = ctypes.POINTER(ctypes.c_int64)
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self._next = _function(waiting.hvdlite_next, integers, integers)
        self.serve = _function(quick.hvdlite_serve, None)
        self.allocate = _function(
            quick.hvdlite_allocate, pointer, pointer, number, number, integers
        )
        self.end = _function(quick.hvdlite_end, pointer, pointer, number, ctypes.c_char_p)
        self.finish = _function(waiting.hvdlite_finish, None, pointer)
        self._use_events = _function(quick.hvdlite_use_events, None, *[pointer] * 4)

    def use(self, accelerator: Accelerator) -> None:
        """Let graphs mark with events where tensors are ready on a device."""
        self._use_events(*addresses(accelerator.cuda), accelerator.stream_of_host)

    def next(self) -> list[int]:
        """Sleep until graphs have enqueued collectives, and return the record of all of them."""
        length = ctypes.c_int64()
        record: list[int] = self._next(ctypes.byref(length))[: length.value]
        return record


def _named(operation: Any) -> Any:
    """Tell what TensorFlow has generated from a script of ``python -c``, "<string>" as well."""
    generated = inspect.unwrap(operation)
    generated.__code__ = generated.__code__.replace(co_filename=GENERATED)
    return operation


def _function(function: Any, result: Any, *arguments: Any) -> Any:
    function.restype, function.argtypes = result, arguments
    return function
