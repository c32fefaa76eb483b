"""Gives orders to the ranks of this host, by named pipes in a folder that they know of.

A rank makes its pipe in `init`: see hvdlite/common/connections/order_lines.py. Whoever gives one
never waits for a rank.
"""

from __future__ import annotations

import contextlib
import os

from hvdlite.common.connections.order_lines import COUNT, OF_ALL, PASS, PIPE_NAME, Order, pack_order
from hvdlite.common.requests.messages import EVERY_RANK


def give(folder: str, rank: int, line: str) -> None:
    """Give one order; without effect where the rank does not listen, or not fast enough."""
    _write(os.path.join(folder, f"{PIPE_NAME}.{rank}"), line)


def pass_on(folder: str, by: int, to: int, line: str) -> None:
    """Give one order through a rank of this host to one of another host. Raises `ValueError`."""
    give(folder, by, pack_order(Order(0, PASS, (to, line))))


def count(folder: str, *, passes: bool = False) -> None:
    """Let all ranks count from now on, also those that have not come to `init` yet.

    With `passes` the ranks of this host tell those of other hosts.
    """
    order = pack_order(Order(0, COUNT))
    lines = [order, pack_order(Order(0, PASS, (EVERY_RANK, order)))] if passes else [order]
    with contextlib.suppress(OSError), open(os.path.join(folder, COUNT), "wb") as file:
        file.write(OF_ALL if passes else b"")  # First, so that none is missed.
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(f"{PIPE_NAME}."):
                _write(os.path.join(folder, name), "\n".join(lines))


def forget(folder: str, rank: int) -> None:
    """Remove the pipe of a rank that has ended."""
    with contextlib.suppress(OSError):
        os.unlink(os.path.join(folder, f"{PIPE_NAME}.{rank}"))


def _write(path: str, line: str) -> None:
    with contextlib.suppress(OSError):
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.write(pipe, f"{line}\n".encode())
        finally:
            os.close(pipe)
