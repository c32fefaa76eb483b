"""What an agent has on its host: a private folder, and the ranks as child processes."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO

from hvdlite.launcher.decisions.endings import NOT_EXECUTABLE, NOT_FOUND
from hvdlite.launcher.hosts.resources import cores, visible_devices
from hvdlite.launcher.jobs.passed_variables import CALL_VARIABLE, home_directory, of_another_job
from hvdlite.launcher.platforms.batch_systems import without_step
from hvdlite.launcher.processes.child import READ_BYTES, Child
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.processes.signals import signal_group

LIVE = "live"
EVENTS = ("raised", "stall", "answer", LIVE)
# The path of a Unix socket may have 107 bytes, and its name here has 8.
LONGEST_PATH = 95


class AgentFolder:
    """A folder in TMPDIR, or in /tmp where that has too long a name for sockets in it.

    It is the meeting place, and has what ranks report, and files for them. Only the user may enter
    it. It goes with the agent.
    """

    def __init__(self) -> None:
        name = f"hvdlite-agent-{os.getpid()}-{os.urandom(6).hex()}"
        base = os.environ.get("TMPDIR") or "/tmp"
        if len(os.fsencode(f"{base}/{name}")) > LONGEST_PATH or not os.access(base, os.W_OK):
            base = "/tmp"
        self.path = os.path.join(base, name)
        os.mkdir(self.path, 0o700)
        os.mkfifo(self.events, 0o600)
        # Open for writing, too: then it does not end when a writer leaves.
        self.events_fd = os.open(self.events, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._unended = b""
        self._answers: deque[int] = deque()
        self._answer: BinaryIO | None = None  # Of the first one.

    @property
    def events(self) -> str:
        """The named pipe in which ranks say what occurs, and what they count."""
        return os.path.join(self.path, "events")

    @property
    def socket(self) -> str:
        """The Unix socket at which the ranks meet."""
        return os.path.join(self.path, "meeting")

    def said(self) -> Iterator[tuple[str, int, str]]:
        """Yield what ranks have said since the last time: the event, the rank, and a text."""
        try:
            data = os.read(self.events_fd, READ_BYTES)
        except BlockingIOError:
            return
        *lines, self._unended = (self._unended + data).split(b"\n")
        for line in lines:
            words = line.decode(errors="replace").split(" ", 3)  # token, event, rank, text
            if len(words) == 4 and words[1] in EVENTS and words[2].isdecimal():
                yield words[1], int(words[2]), words[3]

    # -- files from the launcher, and answers to it

    def append(self, name: str, data: bytes) -> None:
        with open(os.path.join(self.path, os.path.basename(name)), "ab") as file:
            file.write(data)

    def link(self, directory: str) -> None:
        """Let the files of `directory`, which may be large, appear here."""
        for entry in os.scandir(directory):
            os.symlink(entry.path, os.path.join(self.path, entry.name))

    def begin_answer(self, number: int) -> None:
        """Let `next_answer_part` give what the process `number` has left, and its end."""
        self._answers.append(number)

    def next_answer_part(self, most_bytes: int) -> tuple[int | None, bytes]:
        """Return the next part of an answer and whose it is; no bytes at its end."""
        if not self._answers:
            return None, b""
        number = self._answers[0]
        path = os.path.join(self.path, f"answer.{number}.pickle")
        if self._answer is None:
            with contextlib.suppress(FileNotFoundError):
                self._answer = open(path, "rb")  # noqa: SIM115 - it is read in parts
        part = self._answer.read(most_bytes) if self._answer else b""
        if not part:
            self._answers.popleft()
            if self._answer is not None:
                self._answer.close()
                self._answer = None
                os.unlink(path)
        return number, part

    def remove(self) -> None:
        os.close(self.events_fd)
        with contextlib.suppress(OSError):
            for entry in os.scandir(self.path):
                if entry.is_dir(follow_symlinks=False):
                    import shutil  # what a rank has put here, as its home

                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
            os.rmdir(self.path)


MEETING = {False: "HVDLITE_RENDEZVOUS", True: "HVDLITE_ELASTIC_DRIVER"}


class RankProcess(Child):
    """A running rank in a process group of its own; its output goes to `output(stream, data)`.

    It is bound to `cores`; none: to those of the agent. `terminals` are those of a rank that is
    debugged, by file descriptor.
    """

    def __init__(
        self, command: Sequence[str], environ: Mapping[str, str], loop: EventLoop,
        output: Callable[[str, bytes], None], *, cores: Sequence[int] = (),
        terminals: Mapping[int, str] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.pid = 0
        self._pipes = {}
        self._no_start: int | None = None  # The exit code of a rank that could not be started.
        streams: list[Any] = [subprocess.DEVNULL, subprocess.PIPE, subprocess.PIPE]

        def start(words: Sequence[str]) -> None:
            super(RankProcess, self).__init__(
                words, environ, loop, output, streams=streams, cores=cores,
                death_signal=signal.SIGKILL,
            )  # fmt: skip

        with contextlib.ExitStack() as opened:
            try:
                for fd, path in terminals.items():
                    mode = os.O_RDONLY if fd == 0 else os.O_WRONLY
                    streams[fd] = os.open(path, mode | os.O_NOCTTY | os.O_CLOEXEC)
                    opened.callback(os.close, streams[fd])
                try:
                    start(command)
                except OSError as error:
                    if error.errno != errno.ENOEXEC:
                        raise
                    start(["/bin/sh", *command])  # A script whose first line names no shell.
            except OSError as error:
                text = f"hvdlite-run: cannot run {command[0]!r}: {error.strerror}\n"
                output("stderr", text.encode(errors="replace"))
                missing = isinstance(error, FileNotFoundError)
                self._no_start = NOT_FOUND if missing else NOT_EXECUTABLE

    @property
    def code(self) -> int | None:
        return super().code if self._no_start is None else self._no_start

    def signal(self, number: int) -> None:
        """Signal the process and its children, unless it has ended well."""
        if self.pid and self.code != 0:
            signal_group(self.pid, number)

    def end_group(self) -> None:
        """Kill the process, or the children of one that has failed; nothing is signalled any more.

        Its number may be that of another process from now on.
        """
        self.signal(signal.SIGKILL)
        if self.pid:
            self.pid = 0
            self._process.poll()


# The environment of the ranks of one host, as its agent completes it there.


class RankVariables:
    """What is common to the ranks of the host; `job` is the launcher's description of it."""

    def __init__(
        self, job: Mapping[str, Any], folder: AgentFolder, environ_of_agent: Mapping[str, str]
    ) -> None:
        own = dict(environ_of_agent) if job["inherit"] else {}
        own.pop("PYTHONPATH", None)  # The launcher set it, so that the agent finds hvdlite.
        environ = {name: text for name, text in own.items() if not of_another_job(name)}
        environ = without_step(environ | job["variables"])  # The step is that of an agent.
        environ |= {
            "HOME": home_directory(environ) or folder.path,
            MEETING[job["elastic"]]: job["rendezvous"] or f"unix:{folder.socket}",
            "HVDLITE_SECRET": job["secret"],
            "HVDLITE_HOST_NAME": job["host"],
            CALL_VARIABLE: folder.path,
        }
        self._environ, self._job, self._folder = environ, job, folder
        self._local_size = len(job["ranks"])
        self._cores = 0  # That this host leaves to the job, counted when it is needed.

    def check_devices(self) -> None:
        """Raise `ConfigError` where this host has too few devices for its ranks.

        An elastic job has slots here, of which it may never use all.
        """
        if not self._job["elastic"]:
            visible_devices(self._environ, self._local_size - 1)

    def environ_of(self, rank: Mapping[str, Any]) -> dict[str, str]:
        """Return the environment of the rank that the launcher describes so."""
        mine: dict[str, str] = self._environ | rank["variables"]
        events = f"{self._job['token']} {rank['rank']} {self._folder.events}"
        mine["HVDLITE_LAUNCHER_EVENTS"] = events
        mine |= visible_devices(mine, rank["local_rank"])
        if not mine.get("OMP_NUM_THREADS"):
            # Its share of the cores that this host leaves us.
            self._cores = self._cores or cores()
            share = max(1, self._cores // self._local_size)
            bound = self.cores_of(rank)
            mine["OMP_NUM_THREADS"] = str(min(share, len(bound)) if bound else share)
        return mine

    def cores_of(self, rank: Mapping[str, Any]) -> list[int]:
        """Return the cores that the rank is bound to: its share of ours; none if it is free."""
        if not self._job["bind"]:
            return []
        ours = sorted(os.sched_getaffinity(0))
        local_rank, share = rank["local_rank"], max(1, len(ours) // self._local_size)
        first = local_rank * share % len(ours)
        return ours[first : first + share]
