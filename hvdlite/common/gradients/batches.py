"""Batches: gradients that are reduced on their own, and handed to the engine together."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from hvdlite.common.base.topology import Topology
from hvdlite.common.gradients.buckets import buckets_of

# See [Note: why gradients gather twice] in torch/gradient_exchange.py.
ENOUGH_BYTES = 4 << 20
CROWDED = 4  # times as much where the ranks of a host leave no core to the engine


def enough_bytes(topology: Topology, threads: int, cores: int) -> int:
    """Return how many bytes of gradients are sent together, at least, before backward ends.

    Each rank computes with `threads`, on a host of `cores`. Ranks need not agree on it.
    """
    return CROWDED * ENOUGH_BYTES if topology.fills(cores, threads) else ENOUGH_BYTES


def single_and_grouped(
    names: Sequence[str], groups: Sequence[Sequence[str]], *, segmented: bool
) -> tuple[list[str], list[list[str]]]:
    """Return the gradients that are reduced on their own, and the buckets of the others.

    `groups` may name gradients that this step does not have. Where the gradients are `segmented`
    each of those that are in no segment is a bucket too, which is sent as soon as it is ready.
    """
    known = set(names)
    present = [[name for name in group if name in known] for group in groups]
    buckets = buckets_of(names, present)
    if segmented:
        return [], buckets
    grouped = {name for group in present for name in group}
    single = [name for name in names if name not in grouped]
    return single, [bucket for bucket in buckets if bucket[0] in grouped]


def batches_of(
    names: Sequence[str], sizes: Mapping[str, int], topology: Topology, threads: int
) -> list[list[str]]:
    """Divide gradients, in the order in which they become ready, where enough bytes are together.

    `sizes` are in bytes. Each rank computes with so many `threads`; 0 is one for each core.
    """
    cores = len(os.sched_getaffinity(0))
    enough = enough_bytes(topology, threads or cores, cores)
    batches: list[list[str]] = []
    gathered = enough
    for name in names:
        if gathered >= enough:
            batches.append([])
            gathered = 0
        batches[-1].append(name)
        gathered += sizes[name]
    return batches
