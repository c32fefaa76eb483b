"""What a soak trains, in the workers of its job and in the undisturbed run beside it.

Both go through the same steps: `step(number, rank, size)` gives a rank's share of the gradient, and
`apply` takes what all shares come to. The sum of two floats, and of any number of integers below
2**53, does not depend on the order of summation, so equal means equal bit by bit.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

import hvdlite.numpy as hvd
from hvdlite.common.runtime import worlds

if TYPE_CHECKING:
    from elastic_worker import Notes

Array = np.ndarray[Any, Any]
MODULUS = 1 << 31
NUMBERS = 1000


def digest(arrays: Sequence[Array]) -> str:
    """Return a hash of all bytes."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.hexdigest()


def first_weights() -> Array:
    """Return the integers that training starts from."""
    return np.arange(NUMBERS, dtype=np.int64)


def share(weights: Array, number: int, rank: int, size: int) -> Array:
    """Return the share of a rank in step `number`, which depends on all of its arguments."""
    return (weights * (rank + 1) + number * size + first_weights()) % MODULUS


def apply(weights: Array, total: Array) -> Array:
    """Return the weights after a step."""
    return (weights * 1103515245 + total) % MODULUS


def replay(sizes: Sequence[int], wanted: set[int]) -> dict[int, str]:
    """Return the digests before the `wanted` steps of an undisturbed run of worlds of `sizes`."""
    weights, found = first_weights(), {}
    for number, size in enumerate([*sizes, 0]):
        if number in wanted:
            found[number] = digest([weights])
        if size:
            shares = [share(weights, number, rank, size) for rank in range(size)]
            weights = apply(weights, sum(shares[1:], shares[0]))
    return found


def soak(notes: Notes, args: argparse.Namespace) -> None:
    """Train until the end; note the step and the weights with which each world begins."""
    notes.write_alone("started")
    hvd.init()

    @hvd.elastic.run
    def loop(state: Any) -> None:
        notes.write("began", step=state.step, digest=digest([state.weights]))
        ended = False
        while not ended:
            mine = share(state.weights, state.step, hvd.rank(), hvd.size())
            flagged = np.append(mine, int(notes.end.exists()))
            total = hvd.allreduce(flagged, op=hvd.Sum, name="gradient")
            state.weights = apply(state.weights, total[:-1])
            state.step, ended = state.step + 1, bool(total[-1])
            state.commit()
        notes.write("done", step=state.step, digest=digest([state.weights]))

    loop(hvd.elastic.NumpyState(weights=first_weights(), step=0))
    assert worlds.elastic()
