"""The order and the variables of ranks that a scheduler has placed on hosts of its choice."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise, product

import pytest

from hvdlite.common.meeting.placement import new_secret, order_by_host, rank_variables


@pytest.mark.parametrize(
    "hosts", [(*hosts,) for n in (1, 2, 3, 5) for hosts in product("abc", repeat=n)]
)
def test_hosts_stay_together_and_the_first_one_comes_first(hosts: tuple[str, ...]) -> None:
    order = order_by_host(hosts)
    assert sorted(order) == list(range(len(hosts)))
    assert order[0] == 0
    ordered = [hosts[index] for index in order]
    changes = sum(a != b for a, b in pairwise(ordered))
    assert changes == len({*hosts}) - 1
    for host in {*hosts}:
        here = [index for index in order if hosts[index] == host]
        assert here == sorted(here)


@pytest.mark.parametrize("hosts", [("a",), ("a", "a"), ("a", "b"), ("a", "a", "b"), ("a", "b", "b"),
                                   ("a", "b", "a", "c", "a")])  # fmt: skip
def test_the_numbers_of_each_rank(hosts: tuple[str, ...]) -> None:
    ranks = rank_variables(hosts, "h:1", "s")
    seen: Counter[str] = Counter()
    for rank, (host, variables) in enumerate(zip(hosts, ranks, strict=True)):
        local_rank, seen[host] = seen[host], seen[host] + 1
        with_it = [name for name in dict.fromkeys(hosts) if hosts.count(name) > local_rank]
        expected = {
            "RANK": rank,
            "SIZE": len(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_SIZE": hosts.count(host),
            "CROSS_RANK": with_it.index(host),
            "CROSS_SIZE": len(with_it),
        }
        for prefix in ("HVDLITE", "HOROVOD"):
            for name, number in expected.items():
                assert variables.pop(f"{prefix}_{name}") == str(number)
        assert variables == {
            "HVDLITE_RENDEZVOUS": "h:1",
            "HVDLITE_RENDEZVOUS_SERVER": "external",
            "HVDLITE_SECRET": "s",
        }


def test_a_secret_cannot_be_guessed() -> None:
    assert len({new_secret() for _ in range(100)}) == 100
    assert len(bytes.fromhex(new_secret())) == 32
