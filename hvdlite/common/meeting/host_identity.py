"""What tells one host from another: its name, its boot, and its network."""

from __future__ import annotations

import os
import socket
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
