"""Hosts for ranks that are threads: each thread enters a network namespace of its own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
NAMES = tuple(f"hvdlite-tcp{os.getpid()}{letter}" for letter in "ab")
DEVICES = ("ht0", "ht1")


def ip(*words: str) -> None:
    """Run ip."""
    subprocess.run(["ip", *words], check=True, capture_output=True)


def enter(host: int) -> None:
    """Put this thread into the network of a host."""
    descriptor = os.open(f"/run/netns/{NAMES[host]}", os.O_RDONLY)
    try:
        if _libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


@contextmanager
def two_networks(addresses: Sequence[Sequence[str]]) -> Iterator[None]:
    """Two hosts with a cable between them; `addresses` of host and cable, with their prefix."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("network namespaces need root and iproute2")
    try:
        for name in NAMES:
            made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False)
            if made.returncode:
                pytest.skip(f"a network namespace may not be made: {made.stderr!r}")
        first, second = zip(DEVICES, NAMES, strict=True)
        ip("link", "add", first[0], "netns", first[1], "type", "veth",
           "peer", "name", second[0], "netns", second[1])  # fmt: skip
        for name, device, words in zip(NAMES, DEVICES, addresses, strict=True):
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", device, "up")
            for word in words:
                nodad = ("nodad",) if ":" in word else ()
                ip("-n", name, "address", "add", word, "dev", device, *nodad)
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def cut_cable() -> None:
    """Take the far end of the cable down: the near host does not see what becomes of its bytes."""
    ip("-n", NAMES[1], "link", "set", DEVICES[1], "down")


def add_bridge(name: str, address: str) -> None:
    """Give both hosts a bridge of one name and address, as a container manager does, and up."""
    for host in NAMES:
        ip("-n", host, "link", "add", name, "type", "bridge")
        ip("-n", host, "link", "add", "in0", "type", "veth", "peer", "name", "in1")
        ip("-n", host, "link", "set", "in0", "master", name)
        ip("-n", host, "address", "add", address, "dev", name)
        for each in ("in0", "in1", name):
            ip("-n", host, "link", "set", each, "up")
