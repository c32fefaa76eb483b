"""Tells the launcher which rank raised first: by the exit codes alone, victims look like culprits.

A rank that ends by an exception shuts hvdlite down on its way out; the others then fail too, and
may be gone before it. So the rank says at once, through the launcher's named pipe, that it raised.
"""

from __future__ import annotations

import contextlib
import os
import sys
from types import TracebackType

from hvdlite.common.base.errors import HorovodInternalError

EVENTS_VARIABLE = "HVDLITE_LAUNCHER_EVENTS"  # "<token> <rank> <path of the named pipe>"


def report_uncaught() -> None:
    """Have an exception that ends this process reported to the launcher, where there is one."""
    previous, process = sys.excepthook, os.getpid()
    if EVENTS_VARIABLE not in os.environ or getattr(previous, "reports_to_launcher", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if os.getpid() == process:  # a forked child is no rank
            report(error)
        previous(kind, error, traceback)

    hook.reports_to_launcher = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report(error: BaseException) -> None:
    """Tell the launcher, where there is one, that `error` ends this rank."""
    events = os.environ.get(EVENTS_VARIABLE, "")
    if not events:
        return
    token, rank, path = events.split(" ", 2)
    whose = "internal" if isinstance(error, HorovodInternalError) else "own"
    with contextlib.suppress(OSError):  # the launcher is gone
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, f"{token} raised {rank} {whose}\n".encode())
        finally:
            os.close(pipe)
