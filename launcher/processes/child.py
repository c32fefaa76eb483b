"""A child process: it is started in a session of its own, its output is read, and it is ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from subprocess import DEVNULL, PIPE
from typing import Any

from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.output import STREAMS
from hvdlite.launcher.processes.signals import die_with_parent

READ_BYTES = 1 << 16
DRAIN_BYTES = 1 << 20  # At most so much is read after its end: its children may go on.
MOST_SAID_BYTES = 1 << 16  # What is said on standard error later is dropped.
EXIT_SECONDS = 0.5  # How long a process that has closed its output may take to end.
POLL_SECONDS = 0.002  # Between two looks whether a process has ended.


class Child:
    """A process whose output goes to `output(stream, data)`, with no data at the end of a stream.

    Nothing is read from a stream that is not one of `reads`. `streams` are its standard input,
    output and error as `subprocess` has them, `death_signal` is for when we are killed, and `cores`
    are those to which it is bound. Until `close`, its number is that of no other process, group or
    session: it is not reaped before.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], loop: EventLoop,
        output: Callable[[str, bytes], object], *, streams: Sequence[Any] = (DEVNULL, PIPE, PIPE),
        reads: Collection[str] = STREAMS, death_signal: signal.Signals | None = None,
        folder: str | None = None, cores: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._loop, self._output = loop, output
        die = die_with_parent(death_signal) if death_signal is not None else None

        def prepare() -> None:
            if die is not None:
                die()
            if cores:
                os.sched_setaffinity(0, cores)

        self._process = subprocess.Popen(
            command, env=environ, cwd=folder,
            stdin=streams[0], stdout=streams[1], stderr=streams[2],
            start_new_session=True,  # Ctrl-C comes to us alone; we end the job in order.
            preexec_fn=prepare if die or cores else None,  # noqa: PLW1509 - it makes system calls
        )  # fmt: skip
        self.pid = self._process.pid
        pipes = zip(STREAMS, (self._process.stdout, self._process.stderr), strict=True)
        self._pipes = {name: pipe.fileno() for name, pipe in pipes if pipe and name in reads}
        for fd in self._pipes.values():
            os.set_blocking(fd, False)
        self.resume()

    # -- what it prints

    def resume(self) -> None:
        for stream, fd in self._pipes.items():
            self._loop.forget(fd)
            self._loop.listen(fd, partial(self._read, stream))

    def pause(self) -> None:
        """Let it wait when it prints more than its pipes hold."""
        for fd in self._pipes.values():
            self._loop.forget(fd)

    def _read(self, stream: str, _fd: int = -1) -> int:
        try:
            data = os.read(self._pipes[stream], READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self._loop.forget(self._pipes.pop(stream))
            getattr(self._process, stream).close()
        self._output(stream, data)
        return len(data)

    @property
    def prints(self) -> bool:
        """Whether it, or a child of its own, may still print something that is read."""
        return bool(self._pipes)

    def drain(self) -> None:
        """Read what it has printed before its end."""
        for stream in list(self._pipes):
            left = DRAIN_BYTES
            while left > 0 and stream in self._pipes and (count := self._read(stream)):
                left -= count

    # -- what it is told

    def write(self, data: bytes) -> None:
        """Write to its standard input, as far as it takes that at once. Raises `OSError`."""
        assert self._process.stdin is not None
        os.write(self._process.stdin.fileno(), data)

    def close_input(self) -> None:
        """Let it find the end of its input."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def signal(self, number: int) -> None:
        if self.code is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    # -- its end

    @property
    def code(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None while it runs."""
        return self._look(os.WNOHANG)

    def _look(self, options: int) -> int | None:
        if self._process.returncode is None:
            with contextlib.suppress(ChildProcessError):  # SIGCHLD is ignored: nothing is kept.
                end = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | options)
                if end is None:
                    return None
                return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status
        return self._process.poll()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most `seconds`."""
        end = time.monotonic() + seconds
        while self.code is None and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """Kill it where it still runs, and wait for its end."""
        self.signal(signal.SIGKILL)
        self._look(0)

    def close(self) -> None:
        """Kill it where it still runs, and close its streams."""
        self.kill()
        self._process.poll()
        self.pause()
        self._pipes.clear()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()


class LeadingProcess(Child):
    """A process that is an agent, leads to agents (ssh, srun), or answers.

    What it says on standard error is kept. Its output goes to `printed`; None: `take_streams` is
    called. In the root directory, which is the default, no file of the user's shadows a module.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], loop: EventLoop,
        death_signal: signal.Signals | None = None, folder: str | None = "/",
        printed: Callable[[bytes], object] | None = None,
    ) -> None:  # fmt: skip
        self._said, self._printed = b"", printed
        super().__init__(
            command, environ, loop, self._keep, streams=(PIPE, PIPE, PIPE),
            reads=STREAMS if printed else ("stderr",), death_signal=death_signal, folder=folder,
        )  # fmt: skip

    def _keep(self, stream: str, data: bytes) -> None:
        if stream == "stderr":
            self._said = (self._said + data)[:MOST_SAID_BYTES]
        elif self._printed is not None:
            self._printed(data)

    def take_streams(self) -> tuple[int, int]:
        """Return descriptors of its output and its input, which are the caller's from now on."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._process.stdin as writer, self._process.stdout as reader:
            return os.dup(reader.fileno()), os.dup(writer.fileno())

    def said_so_far(self) -> str:
        """Return what it has said on standard error until now."""
        return self._said.decode(errors="replace")

    def said(self) -> str:
        """Return what it has said on standard error, after a moment for its last words."""
        self.wait(EXIT_SECONDS)
        self.drain()  # A child process of it may go on for ever.
        return self.said_so_far()
