"""What tells hosts apart, the place of each rank on and among them, and the variables that tell it.

Ray and Spark start processes where they like. The processes of one host get neighbouring ranks, and
the host of the first process comes first, as Horovod has it.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")
THREAD_NETWORK = Path("/proc/thread-self/ns/net")  # In tests a thread may have one of its own.


def host_identity() -> str:
    """Return a text that is equal for processes of one host, and of no other.

    Containers of one machine count as one host if they share its network and its name.
    """
    return " ".join((socket.gethostname(), boot_id(), network_namespace(NETWORK)))


def boot_id() -> str:
    """Return what tells this start of the machine from others; empty where nothing does."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def network_namespace(link: Path) -> str:
    """Return what `link` says of the network namespace; empty where there is no such link."""
    try:
        return os.readlink(link)
    except OSError:
        return ""


def order_by_host(hosts: Sequence[str]) -> list[int]:
    """Return the indices of processes in the order of their ranks; `hosts` has the host of each."""
    first_on = {host: hosts.index(host) for host in set(hosts)}
    return sorted(range(len(hosts)), key=lambda index: (first_on[hosts[index]], index))


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


def place_variables(place: Mapping[str, object], as_horovod: bool = True) -> dict[str, str]:
    """Return the variables that tell a rank its place, under the names of Horovod as well."""
    prefixes = ("HVDLITE", "HOROVOD") if as_horovod else ("HVDLITE",)
    return {f"{prefix}_{name}": str(text) for prefix in prefixes for name, text in place.items()}


def rank_variables(hosts: Sequence[str], address: str, secret: str) -> list[dict[str, str]]:
    """Return the variables of each rank; `hosts` has the host of each rank.

    `address` is the ``host:port`` at which a server that knows `secret` waits for the ranks.
    """
    meeting = {
        "HVDLITE_RENDEZVOUS": address,
        "HVDLITE_RENDEZVOUS_SERVER": "external",
        "HVDLITE_SECRET": secret,
    }
    return [place_variables(place) | meeting for place in places(hosts)]


def new_secret() -> str:
    return secrets.token_hex(32)
