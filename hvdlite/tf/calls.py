"""A collective as TensorFlow runs it: what is known when a graph is built, and what happens then.

Everything here sees numpy arrays: host views of tensors, without a copy. The module next door
(`python_ops`) puts calls into graphs; without a graph they are run right away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import tensorflow as tf
from tensorflow.python.framework.ops import EagerTensor  # tf.constant would copy

from hvdlite.common.arrays import Array, NumpyAdapter
from hvdlite.common.collectives.table import ROWS
from hvdlite.common.errors import HorovodInternalError
from hvdlite.common.operations import Operation, submit
from hvdlite.common.options import Options
from hvdlite.common.process_sets import ProcessSet
from hvdlite.common.runtime import Runtime, finder
from hvdlite.common.verbs import Signal
from hvdlite.tf.errors import as_tensorflow_errors

ADAPTER = NumpyAdapter()
ROWS_DTYPE = tf.int64
_CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


class Flight(Protocol):
    """A collective that was started on this rank."""

    @property
    def error(self) -> Exception | None:
        """Why it has failed; None while it runs, and when it has ended well."""

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

    def start(self, *arrays: Array) -> Flight:
        """Enqueue it for the values of `inputs`; never waits."""


@dataclass(frozen=True)
class TensorFlight:
    """A collective on tensors."""

    operation: Operation[Array]
    with_rows: bool

    @property
    def error(self) -> Exception | None:
        return next((e.handle.error for e in self.operation.entries if e.handle.error), None)

    def ended_within(self, seconds: float) -> bool:
        return all(entry.handle.ended_within(seconds) for entry in self.operation.entries)

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
        same_rows = ROWS[self.collective].scalars  # what takes a scalar does not cut rows
        if same_rows or tensor.shape.rank in (None, 0):
            return tensor.shape
        return tf.TensorShape([None, *tensor.shape[1:]])

    def start(self, *arrays: Array) -> TensorFlight:
        runtime, options = self.runtime(), self.options
        tensors = arrays[: len(self.tensors)]
        if options.splits is not None:
            options = replace(options, splits=arrays[-1])
        label = f"grouped_{self.collective}" if options.grouped else self.collective
        with runtime.named(self.name, options.process_set) as known:
            entries = submit(
                runtime, ADAPTER, self.collective, f"{label}.{known}", tensors, options
            )
        return TensorFlight(Operation(entries, lambda _, results: results), self.with_rows)


@dataclass(frozen=True)
class SignalFlight:
    """join, or barrier."""

    signal: Signal

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

    def start(self, *arrays: Array) -> SignalFlight:
        return SignalFlight(Signal(self.collective, self.process_set, self.runtime()))


def run_now(calls: Sequence[Call]) -> list[list[tf.Tensor]]:
    """Start all, and wait for all; for eager tensors. Raises the first error when all have ended.

    The outputs are not copied: they are the memory that the engine has written.
    """
    with as_tensorflow_errors():
        flights = [call.start(*map(np.asarray, call.inputs)) for call in calls]
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


def tensor_of(array: Array) -> tf.Tensor:
    """The array as a tensor, its own memory where that is aligned."""
    return EagerTensor(array, _CPU, None)
