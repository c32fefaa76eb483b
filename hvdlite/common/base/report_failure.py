"""Tells by which exception or `sys.exit` a rank ends: the launcher, and others by the engine.

By the exit codes alone, victims look like culprits.

A rank that ends by an exception shuts hvdlite down on its way out; the others then fail too, and
may be gone before it. So the rank says at once, through the launcher's named pipe or its own
standard error, that it raised. A victim's traceback says nothing that the culprit's does not, so
a victim prints one line. Ctrl-C is one line of the launcher's, and none of any rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import Any, NoReturn

from hvdlite.common.base.errors import (
    DEPARTED,
    HAS_SHUT_DOWN,
    NOT_INITIALIZED,
    HorovodInternalError,
)
from hvdlite.common.base.user_frames import is_of_user, without_own_frames

# "<token> <rank> <path>": the launcher's named pipe, or "-" for standard error (on other hosts).
EVENTS_VARIABLE = "HVDLITE_LAUNCHER_EVENTS"
STANDARD_ERROR = "-"
LOG_LEVELS = ("HVDLITE_LOG_LEVEL", "HOROVOD_LOG_LEVEL")
LONGEST_SHOWN = 7  # Lines of the traceback of a forgotten `init`, after its title.
LONGEST_TEXT = 600  # A line of so many characters is written to a pipe as a whole, or not at all.
WRITE_AGAIN_SECONDS = 0.005
LONGEST_REASON = 300  # In an error of each other rank, which may quote it again.

# What other ranks say of this one, by `reason_of_end`; the last one counts.
_reasons = [""]


def report_uncaught() -> None:
    """Have what ends this process told to those who ask, by hooks: `sys.excepthook`, `sys.exit`."""
    previous, process = sys.excepthook, os.getpid()
    if getattr(previous, "reports_failure", False):
        return

    def hook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        if os.getpid() != process:  # a forked child is no rank
            previous(kind, error, traceback)
            return
        report(error)
        if _debugging():
            previous(kind, error, traceback)
            return
        launched, usual = EVENTS_VARIABLE in os.environ, previous is sys.__excepthook__
        if launched and usual and _is_victim(error):
            print(_one_line(error), file=sys.stderr, flush=True)
        elif launched and usual and _forgot_init(error):
            _show_forgotten_init(error)
        elif not (launched and usual and _is_interrupt(error)):  # Of which the launcher tells.
            leave_out_own_frames(error)
            previous(kind, error, error.__traceback__)

    hook.reports_failure = True  # type: ignore[attr-defined]
    sys.excepthook = hook
    sys.exit = _exit


class _Exit(SystemExit):
    """The end of a script by `sys.exit`, at a line of the user's.

    No hook hears of it. But the interpreter, which ends by it, asks for its code, and nobody calls
    the interpreter; who has caught it asks from a function or a module.
    """

    def __init__(self, status: object, where: str) -> None:
        super().__init__(*(() if status is None else (status,)))
        self._status, self._where = status, where

    @property
    def code(self) -> Any:  # type: ignore[override]
        if self._status not in (None, 0):
            try:
                sys._getframe(1)
            except ValueError:
                status = shortened(repr(self._status), LONGEST_REASON)
                _reasons.append(f"has ended by sys.exit({status}) ({self._where})")
        return self._status


def _exit(status: Any = None, /) -> NoReturn:
    """End the interpreter as `sys.exit` does."""
    frame = sys._getframe(1)
    raise _Exit(status, f"{frame.f_code.co_filename}, line {frame.f_lineno}")


def report(error: BaseException) -> None:
    """Tell the launcher, where there is one, that `error` ends this rank; see `reason_of_end`."""
    if not (hasattr(sys, "ps1") or sys.flags.interactive):  # Else the process goes on after it.
        _reasons.append(f"has ended by {shortened(_one_line(error), LONGEST_REASON)}")
    if launcher_pipe() is None:
        return
    # An exception that was raised while a victim's was handled is the victim's, too.
    internal = any(isinstance(each, HorovodInternalError) for each in _chain(error))
    # All ranks have forgotten `init` on the same line, and the launcher shows one report. Of an
    # interrupt nothing else is shown.
    brief = _forgot_init(error) or _is_interrupt(error)
    text = _one_line(error) if brief else " ".join(_describe(error).split())
    if len(text) > LONGEST_TEXT:  # TensorFlow says what has happened at the end.
        text = f"{text[: LONGEST_TEXT // 3]} ... {text[-LONGEST_TEXT * 2 // 3 :]}"
    tell_launcher("raised", f"{'internal' if internal else 'own'} {text}")


def launcher_pipe() -> str | None:
    """Return the launcher's named pipe, STANDARD_ERROR for lines there, or None: no launcher."""
    events = os.environ.get(EVENTS_VARIABLE, "").split(" ", 2)
    return events[2] if len(events) == 3 else None


def tell_launcher(event: str, text: str, *, seconds: float = 0.0) -> None:
    """Write a line of an `event` of this rank to the launcher's pipe; without effect if it is gone.

    A line of up to 4096 bytes is written as a whole, or, where the pipe is full, not at all: after
    some tries, if it may take so many `seconds`.
    """
    token, rank, path = os.environ[EVENTS_VARIABLE].split(" ", 2)
    data = f"{token} {event} {rank} {text}\n".encode(errors="backslashreplace")
    with contextlib.suppress(OSError, ValueError):  # the launcher is gone
        if path == STANDARD_ERROR:
            os.write(2, data)
            return
        pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        try:
            _write_line(pipe, data, seconds)
        finally:
            os.close(pipe)


def _write_line(pipe: int, data: bytes, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            os.write(pipe, data)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(WRITE_AGAIN_SECONDS)


def reason_of_end() -> str:
    """Return how the exception that ends this process is told to other ranks; '': there is none."""
    return _reasons[-1]


def reason_of_shutdown() -> str:
    """Return the same for a shutdown while an exception is handled, as in a `finally`.

    What ends a process or a generator in order is no reason.
    """
    error = sys.exc_info()[1]
    in_order = isinstance(error, SystemExit) and error.code in (None, 0)
    if error is None or in_order or isinstance(error, GeneratorExit):
        return ""
    return f"{HAS_SHUT_DOWN} after {shortened(_one_line(error), LONGEST_REASON)},"


def shortened(text: str, longest: int) -> str:
    """Return `text` with at most `longest` characters."""
    return f"{text[:longest]} ..." if len(text) > longest else text


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


def leave_out_own_frames(error: BaseException) -> None:
    """Shorten the tracebacks of `error`, and of what it comes from, unless debugging."""
    for each in _chain(error) if not _debugging() else ():
        each.__traceback__ = without_own_frames(each.__traceback__)


def _is_interrupt(error: BaseException) -> bool:
    """Return whether `error` is an interrupt that hides no other error."""
    return all(isinstance(each, KeyboardInterrupt) for each in _chain(error))


def _is_victim(error: BaseException) -> bool:
    """Return whether `error` only tells that another rank has failed or left."""
    if not isinstance(error, HorovodInternalError):
        return False
    own = os.environ[EVENTS_VARIABLE].split(" ", 2)[1]
    at_fault = str(error.rank) if error.rank is not None else None
    return at_fault not in (None, own) or DEPARTED in str(error)


def _forgot_init(error: BaseException) -> bool:
    return NOT_INITIALIZED in _describe(error)


def _show_forgotten_init(error: BaseException) -> None:
    """Print the end of the traceback on rank 0: all ranks have the same."""
    if os.environ[EVENTS_VARIABLE].split(" ", 2)[1] != "0":
        return
    leave_out_own_frames(error)
    lines = "".join(traceback.format_exception(None, error, error.__traceback__)).splitlines()
    print("\n".join(lines[:1] + lines[1:][-LONGEST_SHOWN:]), file=sys.stderr, flush=True)


def _debugging() -> bool:
    levels = (os.environ.get(name, "").lower() for name in LOG_LEVELS)
    return any(level in ("debug", "trace") for level in levels)


def _one_line(error: BaseException) -> str:
    """Return the exception and the user's line that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if is_of_user(frame.filename)]
    where = f" ({users[-1].filename}, line {users[-1].lineno})" if users else ""
    return " ".join(_describe(error).split()) + where
