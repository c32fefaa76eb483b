"""Tells the launcher which rank raised first: by the exit codes alone, victims look like culprits.

A rank that ends by an exception shuts hvdlite down on its way out; the others then fail too, and
may be gone before it. So the rank says at once, through the launcher's named pipe, that it raised.
"""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hvdlite.common.errors import HorovodInternalError

EVENTS_VARIABLE = "HVDLITE_LAUNCHER_EVENTS"  # "<token> <rank> <path of the named pipe>"


def report_uncaught() -> None:
    """Have an exception that ends this process reported to the launcher, where there is one."""
    events = os.environ.get(EVENTS_VARIABLE)
    previous = sys.excepthook
    if not events or getattr(previous, "reports_to_launcher", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        _send(events, "internal" if isinstance(error, HorovodInternalError) else "own")
        previous(kind, error, traceback)

    hook.reports_to_launcher = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _send(events: str, whose: str) -> None:
    token, rank, path = events.split(" ", 2)
    try:
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # the launcher is gone
        return
    try:
        os.write(pipe, f"{token} raised {rank} {whose}\n".encode())
    except OSError:
        pass
    finally:
        os.close(pipe)
