"""The check that all ranks have the same tensors before their values are sent in flat buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.elastic.source import Source
from hvdlite.common.runtime.state import for_collective

Kinds = Mapping[str, str]  # by the name of a tensor: its dtype and shape


def check_same_tensors(kinds: Kinds, label: str, source: Source) -> None:
    """Raise `ValueError` on all ranks of a sync if a tensor differs between the root and another.

    `label` names the owner of the tensors, such as a model. Only a digest is sent while all agree.
    """
    process_set = source.process_set
    digest = hashlib.blake2b(repr(list(kinds.items())).encode(), digest_size=16).digest()
    digests = allgather_object(digest, f"elastic.{label}.digest", process_set)
    if len(set(digests)) == 1:
        return
    of_ranks = allgather_object(dict(kinds), f"elastic.{label}.tensors", process_set)
    ranks = process_set.ranks or list(range(for_collective().topology.size))
    root = ranks.index(source.root_rank)
    raise ValueError(_difference(label, ranks, of_ranks, root))


def _difference(label: str, ranks: Sequence[int], of_ranks: Sequence[Kinds], root: int) -> str:
    expected = of_ranks[root]
    for rank, kinds in zip(ranks, of_ranks, strict=True):
        for name in [*expected, *(name for name in kinds if name not in expected)]:
            here, there = kinds.get(name, "no such tensor"), expected.get(name, "no such tensor")
            if here != there:
                return (
                    f"the state's {label} is not the same on all ranks: tensor '{name}' is {there} "
                    f"on rank {ranks[root]} and {here} on rank {rank}: build it alike everywhere"
                )
    return f"the state's {label} has its tensors in another order on another rank"
