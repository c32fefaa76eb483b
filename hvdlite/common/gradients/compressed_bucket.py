"""A bucket of gradients that a compressor with error feedback exchanges, and tools for that.

An exchange is a generator: it starts a collective, works on, and yields the operation when it needs
the result. That way one training thread has several buckets in flight, in every framework.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.api.submit import Operation
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.runtime.current import find, for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.tensors.compression import FeedbackCompressor
from hvdlite.common.tensors.numpy_adapter import Array, NumpyAdapter

# Error feedback: what compressors of one optimizer remember from step to step.
#
# Residuals are what this rank has not sent yet, and added to its next gradient. Factors, the warm
# start of powersgd, and the numbers of steps are the same on all ranks.

Exchange = Generator[Operation[Array], list[Array], None]
RUNNER: EngineRunner[Array] = EngineRunner(NumpyAdapter())
# Long arrays are worked on so many elements at a time, which stay in the cache of a core.
CHUNK_ELEMENTS = 1 << 16


# [Note: residuals and changing ranks]
#
# The sum over all ranks of what was sent and what is left is the sum of all gradients. That is why
# a residual may count once only: a state that comes from another rank, as one that is broadcast,
# brings factors and steps and no residuals, and whoever has some keeps them. A new rank of an
# elastic job begins with zeros. The residual of a rank that leaves is lost: nobody could have got
# it from a process that was killed, and it is worth less than one gradient of one rank.


class FeedbackState:
    """What is remembered for the gradients of one optimizer, by their names."""

    def __init__(self, compressor: FeedbackCompressor, process_set: ProcessSet) -> None:
        self.compressor = compressor
        self.process_set = process_set
        self.residuals: dict[str, Array] = {}
        self.factors: dict[str, Array] = {}
        self.steps: dict[str, int] = {}
        self._owner = uuid.uuid4().hex
        self._era: object = None

    def residual(self, name: str, shape: tuple[int, ...]) -> Array:
        """Return the residual of this name, float32, to be changed in place; zeros at first."""
        residual = self.residuals.get(name)
        if residual is None or residual.shape != shape:
            residual = self.residuals[name] = np.zeros(shape, np.float32)
        return residual

    def factor(self, name: str, shape: tuple[int, int]) -> Array:
        """Return the factor of this name; at first normal random numbers, alike on all ranks."""
        factor = self.factors.get(name)
        if factor is None or factor.shape != shape:
            seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big")
            drawn = np.random.default_rng(seed).standard_normal(shape)
            factor = self.factors[name] = drawn.astype(np.float32)
        return factor

    def count(self, names: Sequence[str]) -> int:
        """Count a step of these gradients; return how many all of them had before."""
        before = min(self.steps.get(name, 0) for name in names)
        for name in names:
            self.steps[name] = self.steps.get(name, 0) + 1
        return before

    def forget(self, name: str) -> None:
        """Begin anew with this name, which is that of another gradient from now on."""
        for known in (self.residuals, self.factors, self.steps):
            known.pop(name, None)

    def begin(self, label: str) -> None:
        """Make factors and steps equal on all ranks, if an era has begun; blocks then.

        The first of the ranks that have made the most steps gives them. All ranks call it, with
        the same `label`, before they send gradients. Raises `HorovodInternalError`.
        """
        era = for_collective().era(self.process_set)
        if era is self._era:
            return
        name = f"compression.{label}"
        steps = max(self.steps.values(), default=0)
        places = allgather_object((steps, for_collective().rank), name, self.process_set)
        most = max(steps for steps, _ in places)
        if most:
            root = min(rank for steps, rank in places if steps == most)
            self.steps, self.factors = broadcast_object(
                (self.steps, self.factors), root, name, self.process_set
            )
        self._era = era

    @property
    def begun(self) -> bool:
        """Whether this is the era of the last `begin`."""
        return self._era is not None and self._era is for_collective().era(self.process_set)

    def save(self) -> dict[str, Any]:
        """Return a copy of all, with numpy arrays."""
        return {
            "compression": str(self.compressor),
            "steps": dict(self.steps),
            "factors": {name: factor.copy() for name, factor in self.factors.items()},
            "residuals": {name: each.copy() for name, each in self.residuals.items()},
            "owner": self._owner,
            "place": _place(),
        }

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take what `save` has returned: residuals from this object, or this rank of as many.

        Others leave the residuals of this rank as they are. A state of another compressor is
        ignored with a warning.
        """
        if saved["compression"] != str(self.compressor):
            warn_user(
                f"the state was saved with Compression.{saved['compression']}, and has no effect "
                f"on Compression.{self.compressor}"
            )
            return
        self.steps = dict(saved["steps"])
        self.factors = {name: np.array(each) for name, each in saved["factors"].items()}
        if saved["owner"] == self._owner or saved["place"] == _place():
            self.residuals = {name: np.array(each) for name, each in saved["residuals"].items()}


def shared_part(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the part of what `FeedbackState.save` has returned that all ranks share."""
    return {**saved, "residuals": {}, "owner": "", "place": []}


def _place() -> list[int]:
    """Return the rank, and the number of ranks; before `init` those of a job of one."""
    runtime = find()
    return [0, 1] if runtime is None else [runtime.rank, runtime.topology.size]


def matrix_shape(shape: tuple[int, ...], rank: int) -> tuple[int, int] | None:
    """Return the shape as a matrix; None where powersgd would not make it half as large."""
    if len(shape) < 2 or not math.prod(shape):
        return None
    rows, columns = shape[0], math.prod(shape[1:])
    return (rows, columns) if 2 * rank * (rows + columns) <= rows * columns else None


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
