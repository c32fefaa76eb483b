"""Runs the discovery script of an elastic job, in the background and again and again."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Callable, Mapping

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import parse_discovery
from hvdlite.launcher.hosts.ssh import spell_end
from hvdlite.launcher.processes.child import LeadingProcess
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import signal_group

EVERY_SECONDS = 1.0  # From the start of a run of the script to that of the next one.
LONGEST_SECONDS = 10.0  # A run that takes longer is killed.
MOST_BYTES = 1 << 20  # Of the output that is kept.


class DiscoveryScript:
    """Calls ``found(hosts)`` after each run that went well, and ``failed(error)`` after others.

    `script` is a path or a line for a shell; `look` starts a run when it is time.
    """

    def __init__(
        self, script: str, default_slots: int, environ: Mapping[str, str], loop: EventLoop,
        found: Callable[[dict[str, int]], None], failed: Callable[[Exception], None],
        longest_seconds: float = LONGEST_SECONDS,
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
            self._fail(f"has not ended within {self._longest_seconds:g} seconds, and was killed")
            return
        self._next_at = now + EVERY_SECONDS
        self._kill_at = now + self._longest_seconds
        line = self._script
        if os.path.isfile(line):  # A path may lack the ``./``, and have spaces.
            line = shlex.quote(os.path.abspath(line))
        try:
            self._run = _Run(line, self._environ, self._loop, self._conclude)
        except OSError as error:
            self._fail(f"cannot be run: {error.strerror}")

    def _fail(self, how: str) -> None:
        self._failed(RuntimeError(f"the discovery script {self._script} {how}"))

    def _conclude(self, run: _Run) -> None:
        err = run.said()  # It reads what is left of the output, too.
        code, out = run.code, run.found.decode(errors="replace")
        run.close()
        self._run = None
        if code:
            lines = [line.strip() for line in err.splitlines() if line.strip()]
            last = f" and said: {lines[-1]}" if lines else ""
            self._fail(f"{spell_end(code)}{last}")
            return
        try:
            hosts = parse_discovery(out, self._default_slots)
        except ConfigError as error:
            self._failed(ConfigError(f"{error} (of {self._script})"))
        else:
            self._found(hosts)

    def close(self) -> None:
        """Leave no process behind."""
        if self._run is not None:
            self._run.close()
            self._run = None


class _Run(LeadingProcess):
    """One run; `ended` is called when the script has ended, whatever its children do."""

    def __init__(
        self, command: str, environ: Mapping[str, str], loop: EventLoop,
        ended: Callable[[_Run], None],
    ) -> None:  # fmt: skip
        self.found = b""  # Its output.
        shell = ["/bin/sh", "-c", command]
        super().__init__(shell, environ, loop, signal.SIGKILL, folder=None, printed=self._add)
        self.close_input()
        self._end_fd = os.pidfd_open(self.pid)
        loop.listen(self._end_fd, lambda _fd: ended(self))

    def _add(self, data: bytes) -> None:
        self.found = (self.found + data)[:MOST_BYTES]

    def close(self) -> None:
        """Kill the script and its children, and close what belongs to it."""
        signal_group(self.pid, signal.SIGKILL)
        super().close()
        self._loop.forget(self._end_fd)
        os.close(self._end_fd)
