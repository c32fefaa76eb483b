"""A bucket of gradients that a compressor with error feedback exchanges, and tools for that.

An exchange is a generator: it starts a collective, works on, and yields the operation when it needs
the result. That way one training thread has several buckets in flight, in every framework.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.api.submit import Operation
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.gradients.error_feedback import FeedbackState
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter

Exchange = Generator[Operation[Array], list[Array], None]
RUNNER: EngineRunner[Array] = EngineRunner(NumpyAdapter())
# Long arrays are worked on so many elements at a time, which stay in the cache of a core.
CHUNK_ELEMENTS = 1 << 16


class Part(NamedTuple):
    """A gradient of a bucket: flat contiguous float32, where the result is written to."""

    name: str
    values: Array
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together, the same ones in the same order on all ranks."""

    parts: Sequence[Part]
    state: FeedbackState
    factor: float  # of the sum over all ranks
    settings: str

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        state: FeedbackState,
        reduction: ReductionConfig,
        settings: str = "",
    ) -> Bucket:
        """Return the bucket of gradients that are reduced as `reduction` says."""
        scaling = reduction.scaling
        factor = scaling.prescale_factor * scaling.postscale_factor
        if scaling.op is ReduceOp.AVERAGE:
            factor /= state.process_set.size()
        return cls(parts, state, factor, f"{settings} {reduction.compression_label}".strip())

    @property
    def members(self) -> int:
        return self.state.process_set.size()

    def add_up(self, label: str, array: Array) -> Operation[Array]:
        """Start to replace an array by its sum over all ranks."""
        return self.start("allreduce", label, array, in_place=True)

    def start(
        self,
        collective: str,
        label: str,
        array: Array,
        splits: list[int] | None = None,
        in_place: bool = False,
    ) -> Operation[Array]:
        """Start a collective on one array."""
        options = CallOptions(
            self.state.process_set,
            ReduceOp.SUM,
            settings="" if splits else self.settings,
            splits=splits,
        )
        name = f"{self.parts[0].name}.{label}"
        return RUNNER.start(collective, [array], name, options, in_place=in_place)


def is_finite(values: Array) -> bool:
    """Return whether all elements of a flat array are finite."""
    return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())


def add(residual: Array, part: Part) -> None:
    """Add a gradient to its residual, of which it is the beginning."""
    flat = residual.reshape(-1)[: part.values.size]
    np.add(flat, part.values, out=flat)


def fail(part: Part, residual: Array) -> None:
    """Give a gradient that is not finite on some rank to all ranks, and begin anew after it."""
    part.values.fill(np.nan)
    residual.fill(0)


def pieces(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[list[Array], Array]:
    """Return views of these shapes, then flat ones, of one new array of zeros; and the array."""
    whole = [*shapes, *((size,) for size in sizes)]
    ends = np.cumsum([0, *(math.prod(shape) for shape in whole)]).tolist()
    array = np.zeros(ends[-1], np.float32)
    return [
        array[start:end].reshape(shape)
        for start, end, shape in zip(ends, ends[1:], whole, strict=False)
    ], array
