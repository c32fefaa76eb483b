"""Runs the discovery script of an elastic job, in the background and again and again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
from collections.abc import Callable, Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import parse_discovery
from hvdlite.launcher.hosts.unreachable import spell_end
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.leading_process import READ_BYTES, LeadingProcess

EVERY_SECONDS = 1.0  # From the start of a run to that of the next one.
LONGEST_SECONDS = 10.0  # A run that takes longer is killed.
MOST_BYTES = 1 << 20  # Of the output that is kept.

Found = Callable[[dict[str, int]], None]
Failed = Callable[[str], None]


class DiscoveryScript:
    """Calls ``found(hosts)`` after each run that went well, and ``failed(text)`` after others.

    `script` is a path or a line for a shell; `look` starts a run when it is time.
    """

    def __init__(
        self, script: str, default_slots: int, environ: Mapping[str, str], loop: EventLoop,
        found: Found, failed: Failed, longest_seconds: float = LONGEST_SECONDS,
    ) -> None:  # fmt: skip
        self._script, self._default_slots = script, default_slots
        self._environ, self._loop = environ, loop
        self._found, self._failed = found, failed
        self._longest_seconds = longest_seconds
        self._run: _Run | None = None
        self._next_at = 0.0
        self._kill_at = 0.0

    @property
    def due(self) -> float:
        """When `look` is to be called, in monotonic seconds."""
        return self._kill_at if self._run is not None else self._next_at

    def look(self, now: float) -> None:
        """Start a run that is due, or end one that takes too long."""
        if now < self.due:
            return
        if self._run is not None:
            self._run.close()
            self._run = None
            self._next_at = now
            self._failed(f"the discovery script {self._script} has not ended within "
                         f"{self._longest_seconds:g} seconds, and was killed")  # fmt: skip
            return
        self._next_at = now + EVERY_SECONDS
        self._kill_at = now + self._longest_seconds
        try:
            self._run = _Run(self._command(), self._environ, self._loop, self._conclude)
        except OSError as error:
            self._failed(f"the discovery script {self._script} cannot be run: {error.strerror}")

    def _command(self) -> str:
        """Return the line for the shell: a path may lack the ``./``, and have spaces."""
        is_file = os.path.isfile(self._script)
        return shlex.quote(os.path.abspath(self._script)) if is_file else self._script

    def _conclude(self, run: _Run) -> None:
        code, out, err = run.result()
        run.close()
        self._run = None
        if code:
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            last = f" and said: {lines[-1]}" if lines else ""
            self._failed(f"the discovery script {self._script} {spell_end(code)}{last}")
            return
        try:
            hosts = parse_discovery(out, self._default_slots)
        except ConfigError as error:
            self._failed(f"{error} (of {self._script})")
        else:
            self._found(hosts)

    def close(self) -> None:
        """Leave no process behind."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run:
    """One run; `ended` is called when the script has ended, whatever its children do."""

    def __init__(
        self, command: str, environ: Mapping[str, str], loop: EventLoop,
        ended: Callable[[_Run], None],
    ) -> None:  # fmt: skip
        self._process = LeadingProcess(
            ["/bin/sh", "-c", command], environ, loop, signal.SIGKILL, folder=None
        )
        self._loop, self._ended = loop, ended
        self._found = b""
        self._fd, writer = self._process.take_streams()
        os.close(writer)
        os.set_blocking(self._fd, False)
        self._end_fd = os.pidfd_open(self._process.pid)
        loop.listen(self._fd, self._read)
        loop.listen(self._end_fd, self._note_end)

    def _read(self, fd: int) -> bool:
        """Read what is there; return whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.forget(fd)
        self._found = (self._found + data)[:MOST_BYTES]
        return bool(data) and len(self._found) < MOST_BYTES

    def _note_end(self, _fd: int) -> None:
        while self._read(self._fd):
            pass
        self._ended(self)

    def result(self) -> tuple[int | None, str, str]:
        """Return how the script has ended, as `LeadingProcess.code`, its output and its errors."""
        said = self._process.said()
        return self._process.code, self._found.decode(errors="replace"), said

    def close(self) -> None:
        """Kill the script and its children, and close what belongs to it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.close()
        for fd in (self._fd, self._end_fd):
            self._loop.forget(fd)
            os.close(fd)
