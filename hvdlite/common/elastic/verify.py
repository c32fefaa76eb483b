"""The comparison of all ranks' weights after a reset, bit by bit (HVDLITE_ELASTIC_CHECK)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.runtime.state import find

Tensors = Iterable[tuple[str, Any]]  # names, and what gives its bytes as a buffer


def compare_ranks(tensors: Callable[[], Tensors]) -> None:
    """Raise `RuntimeError` on all ranks if a tensor differs between two, where that is asked for.

    Every rank calls it; only hashes of 64 bits are exchanged.
    """
    runtime = find()
    if runtime is None or not runtime.config.elastic_check:
        return
    hashes = {name: hash_of(tensor) for name, tensor in tensors()}
    difference = first_difference(allgather_object(hashes, "elastic.check"))
    if difference:
        raise RuntimeError(difference)


def hash_of(tensor: Any) -> str:
    """Return the hash of what gives its bytes as a buffer: 64 bits as hexadecimal digits."""
    return hashlib.blake2b(tensor, digest_size=8).hexdigest()


def first_difference(hashes: Sequence[Mapping[str, str]]) -> str:
    """Return a sentence about the first tensor that two ranks have differently; empty if none.

    `hashes` has those of each rank, in rank order.
    """
    for rank, theirs in enumerate(hashes):
        for name in [*hashes[0], *(name for name in theirs if name not in hashes[0])]:
            first, other = hashes[0].get(name, "none"), theirs.get(name, "none")
            if first != other:
                return (
                    f"after the reset tensor '{name}' differs between rank 0 (hash {first}) and "
                    f"rank {rank} (hash {other}): call commit() at the same points on all ranks, "
                    "and change weights alike on all of them"
                )
    return ""
