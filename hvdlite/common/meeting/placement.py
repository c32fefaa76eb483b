"""Ranks that a cluster's scheduler has placed: their order, and the variables that name them.

Ray and Spark start processes where they like. The processes of one host get neighbouring ranks, and
the host of the first process comes first, as Horovod has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence


def order_by_host(hosts: Sequence[str]) -> list[int]:
    """Return the indices of processes in the order of their ranks; `hosts` has the host of each."""
    first_on = {host: hosts.index(host) for host in set(hosts)}
    return sorted(range(len(hosts)), key=lambda index: (first_on[hosts[index]], index))


def rank_variables(hosts: Sequence[str], address: str, secret: str) -> list[dict[str, str]]:
    """Return the variables of each rank; `hosts` has the host of each rank.

    `address` is the ``host:port`` at which a server that knows `secret` waits for the ranks.
    """
    local_ranks = [list(hosts[:rank]).count(host) for rank, host in enumerate(hosts)]
    names = list(dict.fromkeys(hosts))
    variables = []
    for rank, (host, local_rank) in enumerate(zip(hosts, local_ranks, strict=True)):
        peers = [name for name in names if hosts.count(name) > local_rank]
        numbers = {
            "RANK": rank,
            "SIZE": len(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": hosts.count(host),
            "CROSS_RANK": peers.index(host),
            "CROSS_SIZE": len(peers),
        }
        variables.append(
            {
                f"{prefix}_{name}": str(number)
                for prefix in ("HVDLITE", "HOROVOD")
                for name, number in numbers.items()
            }
            | {
                "HVDLITE_RENDEZVOUS": address,
                "HVDLITE_RENDEZVOUS_SERVER": "external",
                "HVDLITE_SECRET": secret,
            }
        )
    return variables


def new_secret() -> str:
    """Return a secret for one job."""
    return secrets.token_hex(32)
