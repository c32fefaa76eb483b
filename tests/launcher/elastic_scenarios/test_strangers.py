"""Other processes connect to all sockets of a job: nothing comes of it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(120)

LISTENS_TCP, LISTENS_UNIX = "0A", "00010000"
STRANGER = (sys.executable, "-m", "tests.launcher.elastic_scenarios.stranger")
Address = tuple[int, str | tuple[str, int]]


def holders(pids: dict[int, str]) -> dict[str, int]:
    """The sockets that these processes hold, and who holds each."""
    found = {}
    for pid in pids:
        for path in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                target = os.readlink(path)
                if target.startswith("socket:["):
                    found[target[len("socket:[") : -1]] = pid
    return found


def listeners(pids: dict[int, str]) -> Iterator[Address]:
    """Yield family and address of all sockets at which these processes of a host listen."""
    own, network = holders(pids), Path(f"/proc/{next(iter(pids))}/net")
    for line in (network / "tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == LISTENS_TCP and words[9] in own:
            address, port = words[1].split(":")
            host = socket.inet_ntoa(bytes.fromhex(address)[::-1])
            yield socket.AF_INET, (host, int(port, 16))
    for line in (network / "unix").read_text().splitlines()[1:]:
        words = line.split()
        path = words[7] if len(words) > 7 else "/proc/self/"
        if words[3] == LISTENS_UNIX and words[6] in own and not path.startswith("/proc/self/"):
            yield socket.AF_UNIX, path.replace("@", "\0", 1)
    for path in driver_sockets(pids):  # They are bound by way of their folders.
        yield socket.AF_UNIX, path


def driver_sockets(pids: dict[int, str]) -> set[str]:
    """The sockets at which agents listen for their workers."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, address = line.decode().partition("=")
            if name == "HVDLITE_ELASTIC_DRIVER":
                found.add(address.removeprefix("unix:"))
    return found


def attacks(site: Site) -> Iterator[tuple[str, Address]]:
    """Yield each socket of a job, and the host from which it is attacked: another one for TCP."""
    hosts = [*site.workers()]
    agents = 0
    for at, (host, pids) in enumerate(site.workers().items()):
        agents += len(driver_sockets(pids))
        for family, address in listeners(pids):
            other = hosts[(at + 1) % len(hosts)]
            yield other if family == socket.AF_INET else host, (family, address)
    assert agents == max(site.used, 2)  # One on each host.


def test_training_is_not_disturbed(site: Site) -> None:
    with site.elastic(*site.flags(4, hosts=2)) as watch:
        first = watch.world(4)
        found: dict[str, list[Address]] = {}
        for host, address in attacks(site):
            found.setdefault(host, []).append(address)
        for family in (socket.AF_INET, socket.AF_UNIX):
            assert all(family in {each[0] for each in addresses} for addresses in found.values())
        with contextlib.ExitStack() as stack:
            strangers = [
                stack.enter_context(site.beside(host, *STRANGER, json.dumps(addresses)))
                for host, addresses in found.items()
            ]
            for stranger in strangers:
                assert stranger.stdout is not None and stranger.stderr is not None
                assert stranger.stdout.readline() == "closed\n", stranger.stderr.read()
            assert {place.epoch for place in watch.places()} == {1}
            site.kill(first[3])  # Other worlds are built while the silent ones are connected.
            three = watch.world(3)
            assert [place.number for place in three] == [place.number for place in first[:3]]
            again = watch.world(4, epoch=three[0].epoch + 1)
            assert [place.number for place in again[:3]] == [place.number for place in three]
        assert site.end(watch) == 0
