"""What comes from the ranks and from mpirun: events and output, through pipes.

Ranks on this host have named pipes of their own in the job's private directory. What ranks on other
hosts say comes through mpirun, which marks each line with the rank.
"""

from __future__ import annotations

import os
import re
import socket
from functools import partial

from hvdlite.launcher.hosts.hosts import host_of_rank
from hvdlite.launcher.hosts.ssh import has_not_answered
from hvdlite.launcher.jobs.job import FixedJob
from hvdlite.launcher.live.job_view import STALL
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI, SLURM
from hvdlite.launcher.processes.child import READ_BYTES
from hvdlite.launcher.processes.event_loop import Handler
from hvdlite.launcher.processes.output import STREAMS

HARMLESS = b"plm:ssh: Warning: setpgid("  # Of two that move a child to its group, one is late.
# What stands before the words of a rank. That of MPICH, which has the job's token in the place of
# TOKEN, comes before each part that it has read, which may begin within a line.
MARK = {
    OPENMPI: rb"^\[\d+,(\d+)\]<std\w+>: ?",
    HYDRA: rb"\[TOKEN\.(\d+)\] ",
    SLURM: rb"^ *(\d+): ",
}


class Pipes:
    """All pipes of one job. Events go to its `first_failure`, output to its `output`."""

    def __init__(self, directory: str, token: str, mpi_kind: str, job: FixedJob) -> None:
        self.directory = directory
        self.token = token
        self.mark = re.compile(MARK[mpi_kind].replace(b"TOKEN", token.encode()))
        self.job = job
        self.first_failure = job.first_failure
        self.output = job.output
        self.hush = False  # mpirun's own complaints are not worth reading while we end the job
        # What mpirun says before all ranks have started is kept, for where they never do: whoever
        # reads it there finds the cause.
        self.said_early: list[bytes] | None = []
        self._unended: dict[str, bytes] = {}  # the start of a line, of events and by stream
        self._parts: dict[tuple[int, str], bytes] = {}  # the same, of what a rank says by mpirun
        self._own: list[int] = []  # file descriptors to close

    def make(self, ranks: int) -> None:
        """Make the named pipes of `ranks` ranks, and listen to their events."""
        for rank in range(ranks):
            for stream in STREAMS:
                os.mkfifo(self._path(f"{rank}.{stream}"), 0o600)
        os.mkfifo(self._path("events"), 0o600)
        # Open for writing, too: then it does not end when a writer leaves.
        self._open("events", os.O_RDWR, self._read_events)

    def print_early(self) -> None:
        """Print what mpirun has said so far, and from now on whatever it says at once."""
        said, self.said_early = self.said_early, None
        for line in said or ():
            self.output.write("stderr", line + b"\n")

    def close(self) -> None:
        for fd in self._own:
            self.job.loop.forget(fd)
            os.close(fd)
        self._own.clear()

    def _path(self, name: str) -> str:
        return f"{self.directory}/{name}"

    def _open(self, name: str, mode: int, reader: Handler) -> None:
        fd = os.open(self._path(name), mode | os.O_NONBLOCK | os.O_CLOEXEC)
        self._own.append(fd)
        self.job.loop.listen(fd, reader)

    def _take(self, fd: int) -> bytes | None:
        """Read; return b"" at the end, after which `fd` is ignored, None if nothing is there."""
        try:
            data = os.read(fd, READ_BYTES)
        except BlockingIOError:
            return None
        if not data:
            self.job.loop.forget(fd)
        return data

    def _lines(self, source: str, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes; at the end, also the one without a newline."""
        *lines, rest = (self._unended.pop(source, b"") + data).split(b"\n")
        if data:
            self._unended[source] = rest
        elif rest:
            lines.append(rest)
        return lines

    def _read_events(self, fd: int) -> None:
        if data := self._take(fd):
            for line in self._lines("events", data):
                self._event(line)

    def _event(self, line: bytes) -> None:
        """``<token> <event> <rank> <words>``; anything else is not from a rank's shell."""
        token, *words = line.decode(errors="replace").split()
        if token != self.token or len(words) < 3 or not words[1].isdecimal():
            return
        rank = int(words[1])
        if words[0] == "live":
            self.job.live.receive(self._host_of(rank), {rank: " ".join(words[2:])})
        elif words[0] == "answer":
            self.job.live.orders.receive(rank, " ".join(words[2:]))
        elif words[0] == "stall":
            self.job.live.note(STALL, " ".join(words[2:]))
        self.first_failure.receive(words[0], rank, words[2:])
        if words[0] != "start":
            return
        if rank in self.first_failure.here:
            for stream in STREAMS:
                self._open(f"{rank}.{stream}", os.O_RDONLY, partial(self._feed, rank, stream))
        if self.job.all_started:
            self.print_early()

    def _host_of(self, rank: int) -> str:
        """Return the host of a rank, or "" where mpirun alone knows it."""
        if rank in self.first_failure.here:
            return socket.gethostname()
        options = self.job.options
        place = host_of_rank(options.hosts, options.num_proc, rank) if options.hosts else None
        return "" if place is None else place.name

    def _tells_of_lost_host(self, line: bytes) -> bool:
        """Return whether ssh says that a host is lost; then its ranks are, and mpirun will end."""
        text = line.decode(errors="replace")
        match = re.match(r"Timeout, server (\S+) not responding", text)
        if match is None or not self.job.all_started:
            return False
        host = match[1]
        self.hush = True
        options, heard = self.job.options, self.job.first_failure
        for rank in heard.running:
            place = host_of_rank(options.hosts, options.num_proc, rank)
            if place is not None and place.name == host:
                why = has_not_answered(options.peer_timeout_seconds)
                heard.lose(rank, f"is lost with host {host}, which {why}")
        return True

    def _feed(self, rank: int, stream: str, fd: int) -> None:
        if data := self._take(fd):
            self.output.feed(rank, stream, data)

    def read_mpirun(self, stream: str, data: bytes) -> None:
        """Take what an mpirun has printed; no data at the end."""
        for line in self._lines(stream, data):
            # One of mpirun's own, or of ranks on other hosts: all but the last of those go on.
            own, *marked = self.mark.split(line)
            for rank, text in zip(map(int, marked[::2]), marked[1::2], strict=True):
                self._parts[rank, stream] = self._parts.get((rank, stream), b"") + text
            if marked:
                self._end_line(int(marked[-2]), stream)
            if own or not marked:
                self._own_line(own)
        if not data:
            for rank in [rank for rank, name in self._parts if name == stream]:
                self._end_line(rank, stream)

    def _end_line(self, rank: int, stream: str) -> None:
        """Handle a whole line of a rank on another host, in which there may be an event."""
        text, token, rest = self._parts.pop((rank, stream)).partition(self.token.encode())
        if token:
            self._event(token + rest)
        if text or not token:
            # The newline belongs to the event, where there is one: the line of the rank goes on.
            self.output.feed(rank, stream, text if token else text + b"\n")

    def _own_line(self, line: bytes) -> None:
        _, token, rest = line.partition(self.token.encode())
        if token:  # What the mpirun has not marked, although a rank's shell says it.
            self._event(token + rest)
        elif self.hush or HARMLESS in line or self._tells_of_lost_host(line):
            return
        elif self.said_early is not None:
            self.said_early.append(line)
        else:
            self.output.write("stderr", line + b"\n")
