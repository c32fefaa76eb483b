"""Adasum: a sum that shrinks the direction two gradients have in common.

The combination of two vectors is that of Maleki et al., "Scaling distributed training with adaptive
summation", MLSys 2021. The tree for a number of members that is no power of two is ours.

Two vectors, each prescaled, become

    a' = (1 - dot / (2 |a|^2)) a + (1 - dot / (2 |b|^2)) b      dot = a . b, in float64

per tensor; a coefficient whose |x|^2 is below the least normal float64 is 1. With P the greatest
power of two up to N, first every position P + j is folded into j. Then, for d = 1, 2, 4, ... < P,
every position i that 2 d divides combines a = its own vector with b = that of i + d. For N = 7:

    fold   0 + 4    1 + 5    2 + 6    3
    d = 1  (0 + 4) + (1 + 5)          (2 + 6) + 3
    d = 2  ((0 + 4) + (1 + 5)) + ((2 + 6) + 3)

Position 0 postscales, rounds and broadcasts the result, so all members hold the same bits. 16-bit
types are widened to float32 on the way, and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Activity, Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.ring import RingBackend
from hvdlite.common.collectives.chained_view import Chain
from hvdlite.common.collectives.kernels import QUIET, Arithmetic
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.transport.base import Transport

DTYPES = ("float16", "bfloat16", "float32", "float64")
LEAST_NORMAL = float(np.finfo(np.float64).tiny)
BLOCK = 16 << 10  # Elements that are combined at a time: their float64 copies stay in the cache.


class AdasumBackend(RingBackend):
    """Allreduce with the op Adasum. The other collectives are those of `RingBackend`."""

    name = "ADASUM"

    def __init__(self, transport: Transport, shm: ShmBackend) -> None:
        super().__init__(transport)
        self._shm = shm

    def supports(
        self, collective: str, dtype: np.dtype[Any], reduce_op: ReduceOp, members: Members
    ) -> bool:
        """Support Adasum of floating-point tensors, among any members."""
        adasum = collective == "allreduce" and reduce_op == ReduceOp.ADASUM
        return adasum and members.size > 1 and dtype.name in DTYPES

    def allreduce(
        self,
        members: Members,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        reduction: Reduction,
        activity: Activity,
    ) -> None:
        total = sum(array.size for array in inputs)
        if not total:
            return
        scaling = Reduction(ReduceOp.SUM, reduction.prescale, reduction.postscale)
        arithmetic = Arithmetic(inputs[0].dtype, scaling)
        vector = np.empty(total, arithmetic.accumulator)
        for part, values in zip(_split(vector, inputs), inputs, strict=True):
            arithmetic.load(part, values)
        with activity("ADASUM_TREE"):
            self._reduce_up_the_tree(members, vector, inputs)
        result = np.empty(total, arithmetic.output_dtype)
        if members.index == 0:
            arithmetic.store(result, vector)
        one_host = len(members.topology.hosts) == 1
        carrier = self._shm if one_host else RingBackend(self._transport)
        carrier.broadcast(members, [result], 0, activity)
        Chain(outputs).unpack(0, result)

    def _reduce_up_the_tree(
        self, members: Members, vector: Array, tensors: Sequence[Array]
    ) -> None:
        """Combine along the tree, up to the pair in which this member sends its vector away."""
        other = np.empty_like(vector)
        for receiver, sender in pairs(members.size):
            if members.index == sender:
                rank = members.ranks[receiver]
                self._transport.wait([self._transport.isend(rank, vector)])
            elif members.index == receiver:
                rank = members.ranks[sender]
                self._transport.wait([self._transport.irecv(rank, other)])
                for a, b in zip(_split(vector, tensors), _split(other, tensors), strict=True):
                    combine(a, b)


def pairs(size: int) -> list[tuple[int, int]]:
    """Return the pairs (receiver, sender) of the tree in order. A sender has no later pair."""
    power = 1 << (size.bit_length() - 1)
    tree = [(extra - power, extra) for extra in range(power, size)]
    distance = 1
    while distance < power:
        tree += [(i, i + distance) for i in range(0, power, 2 * distance)]
        distance *= 2
    return tree


def combine(a: Array, b: Array) -> None:
    """Combine `b` into `a`. Both are flat arrays of one floating-point dtype."""
    dot = square_a = square_b = 0.0
    with QUIET():
        for start in range(0, a.size, BLOCK):
            left, right = (x[start : start + BLOCK].astype(np.float64) for x in (a, b))
            dot += float(np.add.reduce(left * right))
            square_a += float(np.add.reduce(left * left))
            square_b += float(np.add.reduce(right * right))
        share_a, share_b = _coefficient(dot, square_a), _coefficient(dot, square_b)
        for start in range(0, a.size, BLOCK):
            left, right = (x[start : start + BLOCK].astype(np.float64) for x in (a, b))
            a[start : start + BLOCK] = share_a * left + share_b * right


def _coefficient(dot: float, square: float) -> float:
    return 1.0 if square < LEAST_NORMAL else 1.0 - dot / (2 * square)


def _split(vector: Array, tensors: Sequence[Array]) -> list[Array]:
    """Cut `vector` into parts of the sizes of `tensors`."""
    ends = np.cumsum([tensor.size for tensor in tensors])
    return [vector[end - tensor.size : end] for end, tensor in zip(ends, tensors, strict=True)]
