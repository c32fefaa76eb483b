"""Ports that tests may listen on: workers of one run have ranges of their own.

They lie below those that the system gives to whoever asks for any port.
"""

from __future__ import annotations

import os
import random
import re
import socket
from contextlib import suppress

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 32_000)
PER_WORKER = 500


def free_port() -> int:
    """Return a port that is free now."""
    return free_ports(1)[0]


def free_ports(count: int) -> tuple[int, int]:
    """Return the first and the last of so many ports that are free now."""
    own = _own_ports()
    for first in random.SystemRandom().sample(own[: 1 - count or None], len(own) + 1 - count):
        with suppress(OSError):
            for port in range(first, first + count):
                socket.create_server((LOOPBACK, port)).close()
            return first, first + count - 1
    raise AssertionError("no ports are free")


def _own_ports() -> range:
    """Return the ports of this worker, whose variables the processes inherit that it starts."""
    number = re.fullmatch(r"gw(\d+)", os.environ.get("PYTEST_XDIST_WORKER", ""))
    if number is None:
        return PORTS
    slots = len(PORTS) // PER_WORKER
    first = random.Random(os.environ.get("PYTEST_XDIST_TESTRUNUID")).randrange(slots)
    slot = (first + int(number[1])) % slots
    return PORTS[slot * PER_WORKER : (slot + 1) * PER_WORKER]
