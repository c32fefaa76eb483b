"""Buckets of gradients in a graph, which are reduced in the memory of the graph.

A step gives the addresses of its tensors. All else was prepared when they had these shapes first:
a step in which no shape has changed makes no object for each tensor.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import PreparedBucket, start_bucket
from hvdlite.common.requests.handles import Handle
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import (
    HOST_DEVICE,
    Adapter,
    CpuBuffer,
    HostBuffer,
    Place,
    TensorSpec,
)
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter

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


# What graphs of TensorFlow and programs of JAX have started comes from a queue in compiled code.


def declared(function: Any, result: Any, *arguments: Any) -> Any:
    """Return a function of C, with the types of its result and of its arguments."""
    function.restype, function.argtypes = result, arguments
    return function


class GraphLibrary:
    """The compiled functions of graphs."""

    def __init__(self, path: str) -> None:
        self.waiting = ctypes.CDLL(path)  # Its functions are called without the GIL.
        self.quick = ctypes.PyDLL(path)
        integers = ctypes.POINTER(ctypes.c_int64)
        self._next = declared(self.waiting.hvdlite_next, integers, integers)
        self.serve = declared(self.quick.hvdlite_serve, None)

    def next(self) -> list[int]:
        """Sleep until graphs have started collectives, and return the record of all of them."""
        length = ctypes.c_int64()
        record: list[int] = self._next(ctypes.byref(length))[: length.value]
        return record


def when_all_have_ended(handles: Sequence[Handle], end: Callable[[], None]) -> None:
    """Call ``end()`` when all handles are complete, in the thread that completes the last one."""
    missing = [*range(len(handles))]

    def one_has_ended() -> None:
        if missing.pop() == 0:  # pop() is atomic: exactly one thread sees the last item.
            end()

    for handle in handles:
        handle.on_end(one_has_ended)


class GraphTensor:
    """A tensor of a graph: its memory in this step, and its properties."""

    __slots__ = ("address", "dtype", "spec")

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
        self.address = 0
        self.dtype = dtype
        self.spec = TensorSpec(dtype.name, shape, HOST_DEVICE)


class _GraphTensors(NumpyAdapter):
    """The adapter of such tensors, which are written in place."""

    def spec(self, tensor: Any) -> TensorSpec:
        spec: TensorSpec = tensor.spec
        return spec

    def place(self, tensor: Any, spec: TensorSpec) -> Place | None:
        return (tensor.address, None) if tensor.spec == spec else None

    def output(self, tensor: Any) -> HostBuffer:
        shape = tensor.spec.shape
        return CpuBuffer(array_at(tensor.address, shape, tensor.dtype, READ_AND_WRITE).reshape(-1))


_ADAPTER: Adapter[Any] = _GraphTensors()


class BucketExecution:
    """One execution of a bucket."""

    def __init__(
        self,
        unused: list[Sequence[GraphTensor]],
        tensors: Sequence[GraphTensor],
        bucket: PreparedBucket[Any],
    ) -> None:
        self._unused, self._tensors, self._bucket = unused, tensors, bucket
        self.handle: Handle = bucket.handle

    def release(self) -> None:
        """Let the next execution use what was prepared: this one has ended."""
        self._bucket.release()
        self._unused.append(self._tensors)


class BucketCall(Protocol):
    """The allreduce of gradients of a graph: each under its own name, or all as one group."""

    @property
    def names(self) -> Sequence[str]:
        """The names of the gradients."""

    @property
    def dtypes(self) -> Sequence[np.dtype[Any]]:
        """Their dtypes, as numpy has them."""

    @property
    def options(self) -> CallOptions:
        """How they are reduced."""

    @property
    def runtime(self) -> Callable[[], Runtime]:
        """A function that finds the runtime of the rank, in any thread."""

    @property
    def alone(self) -> bool:
        """Whether nothing else is reduced together with it."""


class GraphBucket:
    """A bucket of a graph, which may be executed any number of times."""

    def __init__(self, call: BucketCall) -> None:
        self._call = call
        # The shapes of the tensors, as a graph tells them, and tensors of these that no execution
        # uses. Executions overlap where a user runs the graph in several threads.
        self._shapes: list[int] = []
        self._unused: list[Sequence[GraphTensor]] = []

    def start(
        self, shapes: list[int], addresses: Sequence[int], *, is_last: bool
    ) -> BucketExecution:
        """Start to reduce the tensors at these addresses.

        `shapes` holds for each tensor its number of dimensions, and these. Where nothing else is
        to be reduced, and this `is_last` of what has come, it may be a short call in this thread:
        it waits for the other ranks for a moment. Raises as `PreparedBucket.start`.
        """
        call = self._call
        tensors = self._tensors(shapes)
        for tensor, address in zip(tensors, addresses, strict=True):
            tensor.address = address
        # Ranks that are threads of one process would wait for each other in this one thread.
        alone = call.alone and is_last and call.runtime is for_collective
        bucket = start_bucket(
            call.runtime(), _ADAPTER, call.names, tensors, call.options, alone=alone
        )
        bucket.exchange()
        return BucketExecution(self._unused, tensors, bucket)

    def _tensors(self, shapes: list[int]) -> Sequence[GraphTensor]:
        if shapes != self._shapes:
            self._shapes, self._unused = shapes, []  # Those in flight come back to the old list.
        with suppress(IndexError):
            return self._unused.pop()
        made = []
        position = 0
        for dtype in self._call.dtypes:
            end = position + 1 + shapes[position]
            made.append(GraphTensor(dtype, tuple(shapes[position + 1 : end])))
            position = end
        return made
