"""Tells the launcher which rank raised first: by the exit codes alone, victims look like culprits.

A rank that ends by an exception shuts hvdlite down on its way out; the others then fail too, and
may be gone before it. So the rank says at once, through the launcher's named pipe or its own
standard error, that it raised. A victim's traceback says nothing that the culprit's does not, so
a victim prints one line. Ctrl-C is one line of the launcher's in an elastic job.
"""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from types import TracebackType

from hvdlite.common.base.errors import DEPARTED, HorovodInternalError

# "<token> <rank> <path>": the launcher's named pipe, or "-" for standard error (on other hosts).
EVENTS_VARIABLE = "HVDLITE_LAUNCHER_EVENTS"
WORKER_VARIABLE = "HVDLITE_WORKER"  # Set in elastic jobs alone.
STANDARD_ERROR = "-"
LOG_LEVELS = ("HVDLITE_LOG_LEVEL", "HOROVOD_LOG_LEVEL")
LONGEST_TEXT = 600  # A line of so many characters is written to a pipe as a whole, or not at all.
OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def report_uncaught() -> None:
    """Have an exception that ends this process reported to the launcher, where there is one."""
    previous, process = sys.excepthook, os.getpid()
    if EVENTS_VARIABLE not in os.environ or getattr(previous, "reports_to_launcher", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != process:  # a forked child is no rank
            previous(kind, error, traceback)
            return
        report(error)
        if previous is not sys.__excepthook__ or _debugging():
            previous(kind, error, traceback)
        elif _is_victim(error):
            print(_one_line(error), file=sys.stderr, flush=True)
        elif not (isinstance(error, KeyboardInterrupt) and WORKER_VARIABLE in os.environ):
            previous(kind, error, traceback)  # The launcher says that it was interrupted.

    hook.reports_to_launcher = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def report(error: BaseException) -> None:
    """Tell the launcher, where there is one, that `error` ends this rank."""
    events = os.environ.get(EVENTS_VARIABLE, "")
    if not events:
        return
    token, rank, path = events.split(" ", 2)
    # An exception that was raised while a victim's was handled is the victim's, too.
    internal = any(isinstance(each, HorovodInternalError) for each in _chain(error))
    text = " ".join(_describe(error).split())
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]} ..."
    line = f"{token} raised {rank} {'internal' if internal else 'own'} {text}\n"
    data = line.encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):  # the launcher is gone
        if path == STANDARD_ERROR:
            os.write(2, data)
            return
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(pipe, data)
        finally:
            os.close(pipe)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield `error`, what caused it, and so on, as a traceback shows them."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        hidden = error.__suppress_context__
        error = error.__cause__ or (None if hidden else error.__context__)


def _describe(error: BaseException) -> str:
    """Return ``Type: text``."""
    try:
        text = str(error)
    except Exception:
        text = "(its text cannot be made)"
    name = type(error).__name__
    return f"{name}: {text}" if text else name


def _is_victim(error: BaseException) -> bool:
    """Return whether `error` only tells that another rank has failed or left."""
    if not isinstance(error, HorovodInternalError):
        return False
    own = os.environ[EVENTS_VARIABLE].split(" ", 2)[1]
    at_fault = str(error.rank) if error.rank is not None else None
    return at_fault not in (None, own) or DEPARTED in str(error)


def _debugging() -> bool:
    levels = (os.environ.get(name, "").lower() for name in LOG_LEVELS)
    return any(level in ("debug", "trace") for level in levels)


def _one_line(error: BaseException) -> str:
    """Return the exception and the user's line that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame for frame in frames
        if not frame.filename.startswith(OWN_FOLDER) and "site-packages" not in frame.filename
    ]  # fmt: skip
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    return " ".join(_describe(error).split()) + where
