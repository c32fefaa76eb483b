"""Error feedback: what compressors of one optimizer remember from step to step.

Residuals are what this rank has not sent yet, and added to its next gradient. Factors, the warm
start of powersgd, and the numbers of steps are the same on all ranks.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.common.api.objects import allgather_object, broadcast_object
from hvdlite.common.base.warn import warn_user
from hvdlite.common.plain.compression import FeedbackCompressor
from hvdlite.common.plain.numpy_adapter import Array
from hvdlite.common.runtime.current import find, for_collective
from hvdlite.common.runtime.process_sets import ProcessSet

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
