"""Runs the discovery script of an elastic job, in the background and again and again."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Mapping
from functools import partial

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import parse_discovery
from hvdlite.launcher.hosts.unreachable import spell_end
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import die_with_parent

EVERY_SECONDS = 1.0  # From the start of a run to that of the next one.
LONGEST_SECONDS = 10.0  # A run that takes longer is killed.
READ_BYTES = 1 << 16
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
        code, out, err = run.code, run.text("stdout"), run.text("stderr")
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
        die = die_with_parent(signal.SIGKILL)
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", command], env=environ, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            preexec_fn=die,  # noqa: PLW1509 - it makes one system call
        )  # fmt: skip
        self._loop, self._ended = loop, ended
        self._said = {"stdout": b"", "stderr": b""}
        self._streams = {"stdout": self._process.stdout, "stderr": self._process.stderr}
        self._end_fd = os.pidfd_open(self._process.pid)
        loop.listen(self._end_fd, self._note_end)
        for name, stream in self._streams.items():
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            loop.listen(stream.fileno(), partial(self._read, name))

    def _read(self, name: str, fd: int) -> bool:
        """Read what is there; return whether there may be more."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self._loop.forget(fd)
        self._said[name] = (self._said[name] + data)[:MOST_BYTES]
        return bool(data) and len(self._said[name]) < MOST_BYTES

    def _note_end(self, _fd: int) -> None:
        for name, stream in self._streams.items():
            assert stream is not None
            while self._read(name, stream.fileno()):
                pass
        self._process.wait()
        self._ended(self)

    @property
    def code(self) -> int:
        """The exit code, or minus the signal that ended the script."""
        return self._process.returncode

    def text(self, name: str) -> str:
        """Return what the script has said on a stream."""
        return self._said[name].decode(errors="replace")

    def close(self) -> None:
        """Kill the script and its children, and close what belongs to it."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._loop.forget(self._end_fd)
        os.close(self._end_fd)
        for stream in self._streams.values():
            assert stream is not None
            self._loop.forget(stream.fileno())
            stream.close()
