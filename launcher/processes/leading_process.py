"""A process that is an agent, leads to agents (ssh, srun), or finds hosts. What it says is kept."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import die_with_parent

READ_BYTES = 1 << 16
MOST_SAID_BYTES = 1 << 16  # What is said on standard error later is dropped.
EXIT_SECONDS = 0.5  # How long a process that has closed its output may take to end.


class LeadingProcess:
    """A process that runs until its agents have ended; `death_signal` is for when we are killed.

    It runs in `folder`, None: where this process does.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], loop: EventLoop,
        death_signal: signal.Signals | None = None, folder: str | None = "/",
    ) -> None:  # fmt: skip
        die = die_with_parent(death_signal) if death_signal is not None else None
        self._process = subprocess.Popen(
            command,
            env=environ,
            cwd=folder,  # In the root directory, no file of the user's shadows a module.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C comes to us alone; we end the job in order.
            preexec_fn=die,  # noqa: PLW1509 - it makes one system call
        )
        self.pid = self._process.pid
        self._loop = loop
        self._said = b""
        assert self._process.stderr is not None
        self._error_fd = self._process.stderr.fileno()
        os.set_blocking(self._error_fd, False)
        loop.listen(self._error_fd, self._read)

    def take_streams(self) -> tuple[int, int]:
        """Return descriptors of its output and its input, which are the caller's from now on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin as writer, self._process.stdout as reader:
            return os.dup(reader.fileno()), os.dup(writer.fileno())

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._process.poll()

    def said_so_far(self) -> str:
        """Return what it has said on standard error until now."""
        return self._said.decode(errors="replace")

    def said(self) -> str:
        """Return what it has said on standard error, after a moment for its last words."""
        self.wait(EXIT_SECONDS)
        # A child process of it may go on for ever.
        while self._error_fd >= 0 and len(self._said) < MOST_SAID_BYTES:
            if not self._read(self._error_fd):
                break
        return self._said.decode(errors="replace")

    def _read(self, fd: int) -> int:
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._loop.forget(fd)
            self._error_fd = -1
        self._said = (self._said + data)[:MOST_SAID_BYTES]
        return len(data)

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, seconds))

    def signal(self, number: int) -> None:
        if self.code is None:
            self._process.send_signal(number)

    def close(self) -> None:
        """Kill it where it still runs, and close its streams."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        self._loop.forget(self._error_fd)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()
        self._error_fd = -1
