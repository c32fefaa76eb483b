"""Two hosts that are simulated by network namespaces, and how their ranks are started."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ADDRESSES = ("10.213.77.1", "10.213.77.2")
DEVICES = ("hv0", "hv1")
NAMES = (f"hvdlite{os.getpid()}a", f"hvdlite{os.getpid()}b")  # of the namespaces

# mpirun starts its daemon on the other host with "AGENT HOST COMMAND ...". Open MPI tells hosts
# apart by their names, so the other one gets a name of its own.
AGENT = """#!/bin/sh
shift
exec ip netns exec {name} unshare --uts sh -c "hostname {name}; $*"
"""


class Hosts(NamedTuple):
    """Simulated hosts, for `jobs.ranks`."""

    before: list[str]  # What goes before "mpirun".
    options: list[str]  # Options of mpirun.
    spelled: str  # As start_ranks.py takes them.


@contextmanager
def two_hosts(folder: Path, slots: Sequence[int]) -> Iterator[Hosts]:
    """Two hosts with `slots` ranks each, joined by a veth pair; `folder` keeps the agent script.

    Removes the hosts at the end; skips the test where namespaces may not be made.
    """
    try:
        _make(NAMES)
        agent = folder / "agent"
        agent.write_text(AGENT.format(name=NAMES[1]))
        agent.chmod(0o755)
        hosts = list(zip(NAMES, ADDRESSES, slots, strict=True))
        for_mpirun = ",".join(f"{address}:{number}" for _, address, number in hosts)
        yield Hosts(
            ["ip", "netns", "exec", NAMES[0]],
            ["--prtemca", "plm_ssh_agent", str(agent), "--host", for_mpirun],
            ",".join(f"{name}:{address}:{number}" for name, address, number in hosts),
        )
    finally:
        for name in NAMES:
            _ip("netns", "del", name)


def _make(names: Sequence[str]) -> None:
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("unshare")):
        pytest.skip("network namespaces need root, iproute2 and unshare")
    for name in names:
        _must("a network namespace", "netns", "add", name)
    ends = [part for name, end in zip(names, DEVICES, strict=True) for part in (end, "netns", name)]
    _must("a veth pair", "link", "add", *ends[:3], "type", "veth", "peer", "name", *ends[3:])
    for name, device, address in zip(names, DEVICES, ADDRESSES, strict=True):
        _must("an address", "-n", name, "address", "add", f"{address}/24", "dev", device)
        for each in ("lo", device):
            _must("a network", "-n", name, "link", "set", each, "up")


def _must(what: str, *arguments: str) -> None:
    result = _ip(*arguments)
    if result.returncode:
        pytest.skip(f"{what} may not be made here: {result.stderr.strip()}")


def _ip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
