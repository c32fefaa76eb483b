"""Calls of collectives from TensorFlow: described when a graph is built, started when it runs.

Tensors are numpy arrays here: host views, without a copy. `graph` puts calls into graphs; without a
graph `run_now` runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor  # tf.constant would copy

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import send_announced
from hvdlite.common.api.submit import Operation, Signal, start
from hvdlite.common.api.tensor_entries import TensorEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.requests.handles import Handle
from hvdlite.common.runtime.current import finder
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter
from hvdlite.tf.accelerators.library import accelerator_now
from hvdlite.tf.accelerators.tensors import DEVICE_ADAPTER, DeviceTensor, lent
from hvdlite.tf.accelerators.tensors import tensor_of as tensor_of_device
from hvdlite.tf.errors import as_tensorflow_errors

ADAPTER = NumpyAdapter()
ROWS_DTYPE = tf.int64


class Started:
    """A collective that was started on this rank.

    `arrays()` sleeps until it has ended, and returns the outputs or raises its error.
    """

    def __init__(
        self, find_handles: Callable[[], list[Handle]], arrays: Callable[[], list[Array]]
    ) -> None:
        self._find_handles = find_handles
        self.arrays = arrays

    @property
    def handles(self) -> list[Handle]:
        """The handles of the collective, which has ended when all of them are complete."""
        return self._find_handles()

    @property
    def error(self) -> Exception | None:
        """The error of a collective that has failed, or None."""
        return next((handle.error for handle in self.handles if handle.error), None)

    def ended_within(self, seconds: float) -> bool:
        """Sleep until it has ended, at most `seconds`; return whether it has."""
        return all(handle.ended_within(seconds) for handle in self.handles)


class Call(Protocol):
    """A collective that can be started, any number of times."""

    @property
    def collective(self) -> str:
        """Its name in the table of collectives."""

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""

    @property
    def runtime(self) -> Callable[[], Runtime]:
        """A function that finds the runtime of the rank, in any thread."""

    @property
    def tensors(self) -> Sequence[tf.Tensor]:
        """The tensors of the collective."""

    @property
    def inputs(self) -> Sequence[tf.Tensor]:
        """The tensors whose values `start` takes: those of the collective, then others."""

    @property
    def outputs(self) -> Sequence[tf.TensorSpec]:
        """The dtypes of the outputs, and their shapes as far as a graph knows them."""

    @property
    def in_place(self) -> bool:
        """Whether an output has the shape of its input, and may have its memory."""

    @property
    def in_order(self) -> bool:
        """Whether it keeps its place among the collectives of a function, as a barrier does."""

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Started:
        """Enqueue it for the values of `inputs`; never waits.

        The outputs are written to `targets` where they are given and the collective is `in_place`;
        otherwise `adapter` makes them.
        """


@dataclass
class TensorCall:
    """A collective on one tensor, or on a group.

    The outputs are as many tensors, followed, where ranks may give different numbers of rows, by
    as many rows of ints: how many rows of the output came from each member.
    """

    collective: str
    tensors: Sequence[tf.Tensor]
    name: str | None
    options: CallOptions
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    in_order = False

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self.options.process_set

    @property
    def with_rows(self) -> bool:
        """Whether there are outputs that tell how many rows came from each member."""
        return SPECS[self.collective].varying_rows

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The tensors, and the splits where there are some."""
        splits = self.options.splits
        return [*self.tensors] if splits is None else [*self.tensors, splits]

    @property
    def outputs(self) -> list[tf.TensorSpec]:
        """The dtypes of the outputs, and their shapes as far as they are known."""
        outputs = []
        for tensor in self.tensors:
            shape = tensor.shape
            if not self.in_place and shape.rank not in (None, 0):
                shape = tf.TensorShape([None, *shape[1:]])
            outputs.append(tf.TensorSpec(shape, tensor.dtype))
        if self.with_rows:
            outputs += [tf.TensorSpec([None], ROWS_DTYPE)] * len(self.tensors)
        return outputs

    @property
    def in_place(self) -> bool:
        """Whether the outputs have the shapes of the inputs."""
        return SPECS[self.collective].scalars  # A collective that takes scalars does not cut rows.

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Started:
        runtime, options = self.runtime(), self.options
        tensors = arrays[: len(self.tensors)]
        if options.splits is not None:
            options = options._replace(splits=arrays[-1])
        entries = start(runtime, adapter, self.collective, self.name, tensors, options, targets)
        return Started(lambda: [entry.handle for entry in entries], lambda: self._results(entries))

    def _results(self, entries: Sequence[TensorEntry[Array]]) -> list[Array]:
        """Return the results, then for each of them the rows of each member if those may differ."""
        results = Operation(entries).wait_for_tensors()
        if self.with_rows:
            results += [np.array(entry.rows, np.int64) for entry in entries]
        return results


@dataclass
class SignalCall:
    """A collective without a tensor."""

    collective: str
    process_set: ProcessSet
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    tensors: Sequence[tf.Tensor] = ()
    inputs: Sequence[tf.Tensor] = ()
    outputs: Sequence[tf.TensorSpec] = (tf.TensorSpec([], tf.int32),)
    in_place = False
    in_order = True

    def start(
        self,
        arrays: Sequence[Array] = (),
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Started:
        signal = Signal(self.collective, self.process_set, self.runtime())
        # The rank that joined last; 0 for a barrier.
        return Started(lambda: [signal.handle], lambda: [np.array(signal.wait(), np.int32)])


def by_call(results: Sequence[tf.Tensor], calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Return the outputs of each call among those of all in a graph, with their known shapes."""
    remaining = iter(results)
    outputs = []
    for call in calls:
        outputs.append([next(remaining) for _ in call.outputs])
        for result, output in zip(outputs[-1], call.outputs, strict=True):
            result.set_shape(output.shape)
    return outputs


def run_now(calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Start all calls on eager tensors, and wait for all of them, also if one has failed.

    Raises the first error. After a KeyboardInterrupt the other ranks have what was started.
    The outputs are not copied: they are the memory that the engine has written.
    """
    with as_tensorflow_errors():
        try:
            return _wait_for_all(calls, [*map(_start_now, calls)])
        except BaseException:
            for call in calls:
                send_announced(call.runtime())
            raise


def _wait_for_all(calls: Sequence[Call], collectives: Sequence[Started]) -> list[list[tf.Tensor]]:
    results: list[list[tf.Tensor]] = []
    failures: list[HorovodInternalError] = []
    for call, started in zip(calls, collectives, strict=True):
        try:
            results.append(
                [
                    tensor_of_device(array, call.tensors[0])
                    if isinstance(array, DeviceTensor)
                    else tensor_of(array)
                    for array in started.arrays()
                ]
            )
        except HorovodInternalError as error:
            failures.append(error)
    if failures:
        raise failures[0]
    return results


def _start_now(call: Call) -> Started:
    accelerator = accelerator_now(call.tensors, call.runtime)
    if accelerator is None:
        return call.start([*map(array_of, call.inputs)])
    values: list[Any] = [
        lent(accelerator, tensor, keeps_shape=call.in_place) for tensor in call.tensors
    ]
    values += map(array_of, call.inputs[len(values) :])
    return call.start(values, DEVICE_ADAPTER)


def array_of(tensor: tf.Tensor) -> Array:
    """Return a host view of an eager tensor; a scalar is copied."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def tensor_of(array: Array) -> tf.Tensor:
    """Return the array as a tensor, which shares its memory if that is aligned."""
    return EagerTensor(array, _cpu(), None)


@cache
def _cpu() -> str:
    """Return the full name of the host's device. This starts TensorFlow if nothing else has."""
    with tf.device("CPU:0"):
        name: str = tf.constant(0).device
    return name
