"""The order and the variables of ranks that a scheduler has placed on hosts of its choice."""

from __future__ import annotations

import socket
from collections import Counter
from itertools import chain, pairwise, product
from pathlib import Path

import pytest

from hvdlite.common.meeting import placement
from hvdlite.common.meeting.placement import new_secret, order_by_host, rank_variables
from hvdlite.common.transport.tcp import connect


def test_hosts_stay_together_and_the_first_one_comes_first() -> None:
    for hosts in chain.from_iterable(product("abc", repeat=n) for n in (1, 2, 3, 5)):
        order = order_by_host(hosts)
        assert sorted(order) == list(range(len(hosts)))
        assert order[0] == 0
        ordered = [hosts[index] for index in order]
        changes = sum(a != b for a, b in pairwise(ordered))
        assert changes == len({*hosts}) - 1, hosts
        for host in {*hosts}:
            here = [index for index in order if hosts[index] == host]
            assert here == sorted(here), hosts


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


def test_a_system_without_a_boot_id_has_an_identity(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Sandboxes for containers such as gVisor hide parts of /proc."""
    known = placement.host_identity()
    monkeypatch.setattr(placement, "BOOT_ID", tmp_path / "boot_id")
    monkeypatch.setattr(placement, "NETWORK", tmp_path / "net")
    monkeypatch.setattr(connect, "THREAD_NETWORK", tmp_path / "net")
    assert placement.host_identity().split() == known.split()[:1]
    assert connect._machine() == connect._machine()


@pytest.mark.parametrize("part", ["its name", "its boot", "its network"])
def test_hosts_that_differ_in_one_part_are_two(
    part: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Virtual machines of one image have one name, and containers of one machine one boot."""
    boot, network = tmp_path / "boot_id", tmp_path / "net"
    boot.write_text("1\n")
    network.symlink_to("net:[1]")
    monkeypatch.setattr(placement, "BOOT_ID", boot)
    monkeypatch.setattr(placement, "NETWORK", network)
    first = placement.host_identity()
    assert placement.host_identity() == first
    if part == "its name":
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
    elif part == "its boot":
        boot.write_text("2\n")
    else:
        network.unlink()
        network.symlink_to("net:[2]")
    assert placement.host_identity() != first
