"""Which host comes first, and the place of each rank among the hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def order_hosts(previous: Sequence[str], available: Iterable[str]) -> list[str]:
    """Return the available hosts: those of the last assignment in their old order, then the new.

    Ranks therefore never swap their order, and rank 0 is one that was there before.
    """
    new = list(available)
    old = [host for host in previous if host in new]
    return old + [host for host in new if host not in old]


def fill_hosts(
    slots: Mapping[str, int], max_np: int | None = None, min_np: int | None = None
) -> list[str]:
    """Return the host of each rank when hosts are filled in their order, up to `max_np` ranks.

    Raises `ValueError` where that gives fewer than `min_np`; a running driver waits instead.
    """
    hosts = [host for host, count in slots.items() for _ in range(count)][:max_np]
    if min_np is not None and len(hosts) < min_np:
        raise ValueError(
            f"Requested more processes ({min_np}) than there are slots ({len(hosts)}): "
            "add hosts or slots, or lower min_np"
        )
    return hosts


def places(hosts: Sequence[str]) -> list[dict[str, int]]:
    """Return the place of each rank, given the host of each rank.

    A cross rank counts the hosts that have a rank with this local rank.
    """
    local_sizes, cross_sizes = Counter(hosts), Counter[int]()
    local_ranks = Counter[str]()
    result = []
    for rank, host in enumerate(hosts):
        local_rank = local_ranks[host]
        local_ranks[host] += 1
        result.append(
            {
                "RANK": rank,
                "SIZE": len(hosts),
                "LOCAL_RANK": local_rank,
                "LOCAL_SIZE": local_sizes[host],
                "CROSS_RANK": cross_sizes[local_rank],
            }
        )
        cross_sizes[local_rank] += 1
    return [{**place, "CROSS_SIZE": cross_sizes[place["LOCAL_RANK"]]} for place in result]
