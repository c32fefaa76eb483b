"""A collective as TensorFlow runs it: what is known when a graph is built, and what happens then.

Everything here sees numpy arrays: host views of tensors, without a copy. The module next door
(`graph`) puts calls into graphs; without a graph they are run right away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor  # tf.constant would copy

from hvdlite.common.api.differentiable import Signal
from hvdlite.common.api.options import Options
from hvdlite.common.api.submit import Operation, submit
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import ROWS
from hvdlite.common.plain.handles import Handle
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import finder
from hvdlite.tf.errors import as_tensorflow_errors

ADAPTER = NumpyAdapter()
ROWS_DTYPE = tf.int64


class Flight(Protocol):
    """A collective that was started on this rank."""

    @property
    def error(self) -> Exception | None:
        """Why it has failed; None while it runs, and when it has ended well."""

    @property
    def handles(self) -> Sequence[Handle]:
        """It has ended when all of these have."""

    def ended_within(self, seconds: float) -> bool:
        """Sleep until it has ended, at most so long; whether it has."""

    def arrays(self) -> list[Array]:
        """Sleep until it has ended; the outputs. Raises its error."""


class Call(Protocol):
    """A collective that can be started, any number of times."""

    @property
    def runtime(self) -> Callable[[], Runtime]:
        """What finds the runtime of the rank, in any thread."""

    @property
    def inputs(self) -> Sequence[tf.Tensor]:
        """The tensors whose values `start` takes."""

    @property
    def outputs(self) -> Sequence[tf.TensorSpec]:
        """The dtypes of the outputs, and their shapes as far as they are known."""

    @property
    def in_place(self) -> bool:
        """Whether an output has the shape of its input, and may have its memory."""

    @property
    def in_order(self) -> bool:
        """Whether in a function it keeps its place among the collectives before and after it."""

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> Flight:
        """Enqueue it for the values of `inputs`; never waits.

        The outputs are written to `targets` where they are given and the collective is `in_place`;
        otherwise `adapter` makes them.
        """


@dataclass(frozen=True)
class TensorFlight:
    """A collective on tensors."""

    operation: Operation[Array]
    with_rows: bool

    @property
    def handles(self) -> list[Handle]:
        return [entry.handle for entry in self.operation.entries]

    @property
    def error(self) -> Exception | None:
        return next((handle.error for handle in self.handles if handle.error), None)

    def ended_within(self, seconds: float) -> bool:
        return all(handle.ended_within(seconds) for handle in self.handles)

    def arrays(self) -> list[Array]:
        """The results, and for each of them the rows of each member where those may differ."""
        results = self.operation.take()
        if self.with_rows:
            results += [np.array(entry.rows, np.int64) for entry in self.operation.entries]
        return results


@dataclass
class TensorCall:
    """A collective on one tensor, or on a group.

    The outputs are as many tensors, followed, where ranks may give different numbers of rows, by
    as many rows of ints: how many rows of the output came from each member.
    """

    collective: str
    tensors: Sequence[tf.Tensor]
    name: str | None
    options: Options
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    in_order = False

    @property
    def with_rows(self) -> bool:
        """Whether the outputs tell where their rows came from."""
        return ROWS[self.collective].varying_rows

    @property
    def inputs(self) -> list[tf.Tensor]:
        """The tensors, and the splits where there are some."""
        splits = self.options.splits
        return [*self.tensors] if splits is None else [*self.tensors, splits]

    @property
    def outputs(self) -> list[tf.TensorSpec]:
        """Their dtypes, and their shapes as far as they are known."""
        outputs = [tf.TensorSpec(self._shape(tensor), tensor.dtype) for tensor in self.tensors]
        if self.with_rows:
            outputs += [tf.TensorSpec([None], ROWS_DTYPE)] * len(self.tensors)
        return outputs

    def _shape(self, tensor: tf.Tensor) -> tf.TensorShape:
        if self.in_place or tensor.shape.rank in (None, 0):
            return tensor.shape
        return tf.TensorShape([None, *tensor.shape[1:]])

    @property
    def in_place(self) -> bool:
        """Whether the outputs have the shapes of the inputs."""
        return ROWS[self.collective].scalars  # what takes a scalar does not cut rows

    def start(
        self,
        arrays: Sequence[Array],
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> TensorFlight:
        runtime, options = self.runtime(), self.options
        tensors = arrays[: len(self.tensors)]
        if options.splits is not None:
            options = options._replace(splits=arrays[-1])
        label = f"grouped_{self.collective}" if options.grouped else self.collective
        with runtime.named(self.name, options.process_set) as known:
            entries = submit(
                runtime, adapter, self.collective, f"{label}.{known}", tensors, options, targets
            )
        return TensorFlight(Operation(entries, lambda _, results: results), self.with_rows)


@dataclass(frozen=True)
class SignalFlight:
    """join, or barrier."""

    signal: Signal

    @property
    def handles(self) -> list[Handle]:
        return [self.signal.handle]

    @property
    def error(self) -> Exception | None:
        return self.signal.handle.error

    def ended_within(self, seconds: float) -> bool:
        return self.signal.handle.ended_within(seconds)

    def arrays(self) -> list[Array]:
        """The rank that joined last; 0 for a barrier."""
        return [np.array(self.signal.wait(), np.int32)]


@dataclass
class SignalCall:
    """A collective without a tensor."""

    collective: str
    process_set: ProcessSet
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    inputs: Sequence[tf.Tensor] = ()
    outputs: Sequence[tf.TensorSpec] = (tf.TensorSpec([], tf.int32),)
    in_place = False
    in_order = True

    def start(
        self,
        arrays: Sequence[Array] = (),
        adapter: NumpyAdapter = ADAPTER,
        targets: Sequence[Array] | None = None,
    ) -> SignalFlight:
        return SignalFlight(Signal(self.collective, self.process_set, self.runtime()))


def run_now(calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Start all, and wait for all; for eager tensors. Raises the first error when all have ended.

    The outputs are not copied: they are the memory that the engine has written.
    """
    with as_tensorflow_errors():
        flights = [call.start([*map(array_of, call.inputs)]) for call in calls]
        results: list[list[tf.Tensor]] = []
        failures: list[HorovodInternalError] = []
        for flight in flights:
            try:
                results.append([tensor_of(array) for array in flight.arrays()])
            except HorovodInternalError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return results


def array_of(tensor: tf.Tensor) -> Array:
    """A host view of an eager tensor; a scalar is copied."""
    return np.asarray(tensor if tensor.shape.rank else tensor.numpy())


def tensor_of(array: Array) -> tf.Tensor:
    """The array as a tensor, its own memory where that is aligned."""
    return EagerTensor(array, _cpu(), None)


@cache
def _cpu() -> str:
    """The full name of the host's device. To ask also starts TensorFlow, where nothing else has."""
    with tf.device("CPU:0"):
        name: str = tf.constant(0).device
    return name
