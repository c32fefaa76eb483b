"""The compiled operations as Python calls them."""

from __future__ import annotations

import ctypes
import inspect
from typing import Any

import tensorflow as tf

from hvdlite.common.gradients.graph_buckets import GraphLibrary, declared
from hvdlite.tf.accelerators.library import Accelerator
from hvdlite.tf.errors import GENERATED


class Library(GraphLibrary):
    """The compiled operations, and the C functions beside them."""

    def __init__(self, path: str) -> None:
        operations: Any = tf.load_op_library(path)
        self.start, self.take = _named(operations.hvdlite_start), _named(operations.hvdlite_take)
        super().__init__(path)
        quick, pointer, number = self.quick, ctypes.c_void_p, ctypes.c_int
        integers = ctypes.POINTER(ctypes.c_int64)
        self.allocate = declared(quick.hvdlite_allocate, pointer, pointer, number, number, integers)
        self.end = declared(quick.hvdlite_end, pointer, pointer, number, ctypes.c_char_p)
        self.finish = declared(self.waiting.hvdlite_finish, None, pointer)
        self._use_events = declared(quick.hvdlite_use_events, None, *[pointer] * 4)

    def use(self, accelerator: Accelerator) -> None:
        """Let graphs mark with events where tensors are ready on a device."""
        functions = map(
            accelerator.cuda.function,
            ("cudaEventCreateWithFlags", "cudaEventRecord", "cudaEventDestroy"),
        )
        addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions]
        self._use_events(*addresses, accelerator.stream_of_host)


def _named(operation: Any) -> Any:
    """Tell what TensorFlow has generated from a script of ``python -c``, "<string>" as well."""
    generated = inspect.unwrap(operation)
    generated.__code__ = generated.__code__.replace(co_filename=GENERATED)
    return operation
