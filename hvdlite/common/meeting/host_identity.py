"""What tells one host from another: its name, its boot, and its network."""

from __future__ import annotations

import os
import socket
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NETWORK = Path("/proc/self/ns/net")


def host_identity() -> str:
    """Return a text that is equal for processes of one host, and of no other.

    Containers of one machine count as one host if they share its network and its name.
    """
    return " ".join((socket.gethostname(), _boot_id(), _network()))


def _boot_id() -> str:
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _network() -> str:
    try:
        return os.readlink(NETWORK)
    except OSError:
        return ""
