"""Names of hosts that have no address yet: those of pods get one when the pod is ready."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence

from hvdlite.launcher.processes.console import say
from hvdlite.launcher.processes.signals import SignalInbox

PAUSE_SECONDS = 0.5
MOST_NAMED = 6


def has_address(name: str) -> bool:
    """Ask the system's resolver, which may take a few seconds where no server answers."""
    try:
        return bool(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM))
    except (OSError, UnicodeError):  # the latter: no name of DNS at all
        return False


def names_without_address(
    names: Sequence[str],
    timeout_seconds: float,
    signals: SignalInbox,
    has_address: Callable[[str], bool] = has_address,
) -> list[str]:
    """Return the names that have no address after `timeout_seconds`, or when a signal comes.

    That is an empty list as soon as each name has had one.
    """
    deadline = time.monotonic() + timeout_seconds
    told = False
    missing = list(names)
    while True:
        missing = [name for name in missing if signals.received or not has_address(name)]
        left = deadline - time.monotonic()
        if not missing or signals.received or left <= 0:
            return missing
        if not told:
            told = True
            say(f"waiting up to {timeout_seconds:g} seconds for an address of {listed(missing)}")
        select.select([signals], [], [], min(PAUSE_SECONDS, left))


def listed(names: Sequence[str]) -> str:
    """Return the first of `names`, and how many more there are."""
    text = ", ".join(names[:MOST_NAMED])
    more = len(names) - MOST_NAMED
    return f"{text} and {more} more" if more > 0 else text
