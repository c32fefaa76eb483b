"""Collectives in a graph, by the operations of `ops.cc`.

    TensorFlow's threads            the thread "hvdlite-tf"          the engine
    HvdliteStart -> queue           hvdlite_next -> Call.start       runs it
    HvdliteTake sleeps, holds no thread, and is ended by             Handle.on_end -> hvdlite_end

TensorFlow's threads never wait for the GIL. The engine reads and writes the tensors' own memory.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import secrets
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.gradients.graph_buckets import (
    READ,
    READ_AND_WRITE,
    BucketExecution,
    GraphBucket,
    array_at,
    when_all_have_ended,
)
from hvdlite.common.runtime.current import find
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter
from hvdlite.tf.accelerators.library import accelerator_of, is_placed, placing
from hvdlite.tf.accelerators.tensors import DEVICE_ADAPTER, placed_at
from hvdlite.tf.calls.bucket_call import BucketCall
from hvdlite.tf.calls.collective_call import ADAPTER, Call, Started, by_call
from hvdlite.tf.calls.python_graph_ops import graphs_around, in_any_order
from hvdlite.tf.native.library import Library


class _Registered:
    def __init__(self, call: Call) -> None:
        self.call = call
        self.bucket = GraphBucket(call) if isinstance(call, BucketCall) else None
        self.in_place = len(call.outputs) if call.in_place else 0
        self.inputs = [_numpy_dtype(tensor) for tensor in call.inputs]
        self.outputs = [_numpy_dtype(output) for output in call.outputs]


def _numpy_dtype(tensor: Any) -> np.dtype[Any]:
    dtype: np.dtype[Any] = np.dtype(tensor.dtype.as_numpy_dtype)
    return dtype


_registered: weakref.WeakValueDictionary[int, _Registered] = weakref.WeakValueDictionary()
# Never the numbers of another process, whose graph may have been saved and loaded here.
_numbers = itertools.count(secrets.randbits(62))


def supports(call: Call) -> bool:
    """Return whether the tensors of the call are plain memory, unlike strings."""
    return all(
        tensor.dtype.is_numpy_compatible and tensor.dtype != tf.string for tensor in call.inputs
    )


def run_in_graph(library: Library, calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Make operations in the current graph that start all calls, and wait for all of them."""
    runtime = find()
    placed = [is_placed(each.tensors, len(each.inputs), runtime) for each in calls]
    accelerator = accelerator_of(runtime)
    if any(placed) and accelerator is not None:
        library.use(accelerator)
    with in_any_order(calls):
        tickets = [
            _start(library, call, on_device) for call, on_device in zip(calls, placed, strict=True)
        ]
        results: dict[int, list[tf.Tensor]] = {}
        for on_device in set(placed):
            chosen = [number for number, each in enumerate(placed) if each == on_device]
            with placing(on_device):
                taken = library.take(
                    [tickets[number] for number in chosen],
                    [output.dtype for number in chosen for output in calls[number].outputs],
                    name="HvdliteTake",
                )
            of_calls = by_call(taken, [calls[number] for number in chosen])
            results.update(zip(chosen, of_calls, strict=True))
    return [results[number] for number in range(len(calls))]


def _start(library: Library, call: Call, on_device: bool) -> tf.Tensor:
    number, registered = next(_numbers), _Registered(call)
    _registered[number] = registered
    for graph in graphs_around():  # It lives as long as the graph, or a function around it.
        if not hasattr(graph, "_hvdlite_calls"):
            graph._hvdlite_calls = []
        graph._hvdlite_calls.append(registered)
    with placing(on_device):
        return library.start(
            call.inputs,
            call=number,
            in_place=registered.in_place,
            filled=registered.bucket is not None,
            on_device=on_device,
            output_types=[output.dtype for output in call.outputs],
            name="HvdliteStart",
        )


# -- the thread


def serve(library: Library) -> None:
    """Start the collectives of graphs for ever."""
    while True:
        record = library.next()
        position = 0
        while position < len(record):
            pointer, number, inputs, targets, stream, event = record[position : position + 6]
            position += 6
            kind: type[_GraphReduction | _GraphCollective] = _GraphReduction
            if inputs or not targets:
                kind = _DeviceCollective if stream else _GraphCollective
            begun = kind(library, pointer, number, (stream, event)).start
            position = begun(record, position, inputs, targets)
            del begun  # The next one may come late.


class _Execution(NumpyAdapter):
    """One execution of a call, from its start to the end of its operations in the graph."""

    def __init__(self, library: Library, pointer: int, number: int, ready: tuple[int, int]) -> None:
        """`ready` are a stream of a device and the event on it behind the inputs, or zeros."""
        self._library = library
        self._pointer = pointer
        self._stream, self._event = ready
        self._registered = _registered.get(number)

    def _find(self) -> _Registered:
        if self._registered is None:
            raise HorovodInternalError("the graph of this collective is no more")
        return self._registered

    def _tell(self, error: Exception | None) -> None:
        code, message = 0, b""
        if error is not None:
            # The code is that of the error that eager execution raises.
            code, message = tf.errors.UNKNOWN, str(error).encode()
            if isinstance(error, HorovodInternalError):
                code = tf.errors.FAILED_PRECONDITION if error.job_goes_on else code
            elif isinstance(error, ValueError):
                code = tf.errors.INVALID_ARGUMENT
        waiting = self._library.end(self._pointer, int(code), message)
        if waiting:
            self._library.finish(waiting)


class _GraphReduction(_Execution):
    """One execution of a bucket, whose outputs have the values of its inputs."""

    _execution: BucketExecution | None = None

    def start(self, record: list[int], position: int, inputs: int, targets: int) -> int:
        """Enqueue the tensors that the record describes; return where the next one begins."""
        end = position + 1 + record[position]
        shapes, addresses = record[position + 1 : end], record[end : end + targets]
        end += targets
        try:
            bucket = self._find().bucket
            assert bucket is not None
            self._execution = bucket.start(shapes, addresses, is_last=end == len(record))
        except Exception as error:
            self._tell(error)
        else:
            self._execution.handle.on_end(self._ended)
        return end

    def _ended(self) -> None:
        assert self._execution is not None
        self._execution.release()
        self._tell(self._execution.handle.error)


class _GraphCollective(_Execution):
    """One collective of a graph. As an adapter it allocates outputs in the memory of the graph."""

    def __init__(self, library: Library, pointer: int, number: int, ready: tuple[int, int]) -> None:
        super().__init__(library, pointer, number, ready)
        self._inputs: list[Array] = []
        self._made: set[int] = set()  # The outputs that are in the memory of the graph.
        self._started: Started | None = None

    def start(self, record: list[int], position: int, inputs: int, targets: int) -> int:
        """Enqueue it on the tensors that the record describes; return where the next one begins."""
        places: list[tuple[int, tuple[int, ...]]] = []
        for _ in range(inputs):
            address, rank = record[position : position + 2]
            position += 2 + rank
            places.append((address, tuple(record[position - rank : position])))
        end = position + targets
        try:
            started = self._enqueue(places, record[position:end])
        except Exception as error:
            self._end(error)
            return end
        self._started = started
        when_all_have_ended(started.handles, lambda: self._end(started.error))
        return end

    def _enqueue(
        self, places: Sequence[tuple[int, tuple[int, ...]]], addresses: Sequence[int]
    ) -> Started:
        registered = self._find()
        self._inputs = [
            array_at(address, shape, dtype, READ)
            for (address, shape), dtype in zip(places, registered.inputs, strict=True)
        ]
        if not registered.in_place:
            return registered.call.start(self._inputs, self)
        written = [
            array_at(address, shape, dtype, READ_AND_WRITE)
            for address, (_, shape), dtype in zip(
                addresses, places, registered.outputs, strict=False
            )
        ]
        return registered.call.start(self._inputs, ADAPTER, written)

    def empty_like(self, tensor: Array, shape: tuple[int, ...]) -> Array:
        number = next(i for i, array in enumerate(self._inputs) if array is tensor)
        return self._make(number, shape)

    def _make(self, number: int, shape: tuple[int, ...]) -> Array:
        assert self._registered is not None
        dims = (ctypes.c_int64 * len(shape))(*shape)
        address = self._library.allocate(self._pointer, number, len(shape), dims)
        self._made.add(number)
        return array_at(address, shape, self._registered.outputs[number], READ_AND_WRITE)

    def _end(self, error: Exception | None) -> None:
        try:
            if error is None:
                self._fill()
        except Exception as failure:
            error = failure
        self._tell(error)

    def _fill(self) -> None:
        """Copy the outputs that are not in the memory of the graph."""
        assert self._registered is not None and self._started is not None
        if self._registered.in_place:
            return
        for number, array in enumerate(self._started.arrays()):
            if number not in self._made:
                self._make(number, array.shape)[...] = array


class _DeviceCollective(_GraphCollective):
    """One collective of a graph whose tensors are on a device, and whose outputs are there."""

    def _enqueue(
        self, places: Sequence[tuple[int, tuple[int, ...]]], addresses: Sequence[int]
    ) -> Started:
        registered = self._find()
        accelerator = accelerator_of(registered.call.runtime())
        if accelerator is None:
            raise HorovodInternalError(
                "this graph reduces on a GPU, and the job that runs it now does not: make the "
                "graph after hvd.init(), or set HVDLITE_DEVICES=off"
            )
        tensors: list[Any] = []
        targets: Sequence[int | None] = addresses or [None] * len(places)
        for (source, shape), target, dtype in zip(places, targets, registered.inputs, strict=True):
            place = source, target, shape, dtype.name
            tensors.append(placed_at(accelerator, *place, self._event))
        self._accelerator = accelerator
        return registered.call.start(tensors, DEVICE_ADAPTER)

    def _fill(self) -> None:
        """Copy the outputs that are not in the memory of the graph, on the stream of the graph."""
        assert self._registered is not None and self._started is not None
        if self._registered.in_place:
            return
        for number, result in enumerate(self._started.arrays()):
            shape = tuple(result.shape)
            dims = (ctypes.c_int64 * len(shape))(*shape)
            address = self._library.allocate(self._pointer, number, len(shape), dims)
            if not address and math.prod(shape):
                raise MemoryError(f"no memory of the device for a tensor of shape {list(shape)}")
            self._accelerator.give(address or 0, result, self._stream)
