"""Say which ranks are missing while `init` waits for them.

MPI waits for all ranks before any two of them can talk. So each rank announces itself to the ranks
of its host, under a name that all of them can compute, and a thread looks who is there. The names
are those of Unix sockets without a file: the kernel forgets them with the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.report_failure import report
from hvdlite.common.meeting.launch import Launch
from hvdlite.common.meeting.start_wait import StartWait

log = logging.getLogger("hvdlite")

GAVE_UP = 1  # The exit code of a process that waits inside MPI, where it cannot raise.
GRACE_SECONDS = 3.0  # A rank that has not raised so long after the limit waits inside MPI.


class Announcement:
    """The announcement to the ranks of this host that this rank has called `init`."""

    def __init__(self, me: Launch) -> None:
        self._me = me
        self._job = hashlib.sha256(f"{os.getuid()} {me.job}".encode()).hexdigest()[:32]
        self._sockets: list[socket.socket] = []
        # Announcements that were found, as ("rank" or "local", rank). They are kept, since a rank
        # that gives up withdraws its own.
        self._seen: set[tuple[str, int]] = set()
        if me.job:
            for kind, number in (("rank", me.rank), ("local", me.local_rank)):
                announcement = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
                try:
                    announcement.bind(self._name(kind, number))
                except OSError:  # The name is in use, so it answers already.
                    announcement.close()
                else:
                    self._sockets.append(announcement)

    def _name(self, kind: str, number: int) -> str:
        return f"\0hvdlite/{self._job}/{kind}/{number}"

    def present(self, kind: str, numbers: Sequence[int]) -> list[int]:
        """Return those of the "rank"s or "local" ranks that have called `init` on this host."""
        for number in numbers:
            if (kind, number) not in self._seen and self._answers(self._name(kind, number)):
                self._seen.add((kind, number))
        return [number for number in numbers if (kind, number) in self._seen]

    @staticmethod
    def _answers(name: str) -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as question:
            try:
                question.connect(name)
            except OSError:
                return False
            return True

    def close(self) -> None:
        """Withdraw the announcement, when `init` is complete."""
        for announcement in self._sockets:
            announcement.close()
        self._sockets.clear()


class StartWatch:
    """A context manager for the waits of `init`: logs the missing ranks every LINE_SECONDS."""

    def __init__(self, me: Launch | None, limit_seconds: float) -> None:
        # World ranks that must come: all of the job, until `connect` knows that it is a part.
        self.expected: Sequence[int] = range(me.size if me else 0)
        self._me = me
        self._announcement = Announcement(me) if me and me.rank >= 0 and me.size > 1 else None
        self._wait = StartWait(
            me.rank if me else 0, me.size if me else 0, time.monotonic() + limit_seconds
        )
        # Set while the main thread is in a call of MPI that returns only with success.
        self._mpi_blocks = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hvdlite-start-watch", daemon=True)

    def __enter__(self) -> StartWatch:
        if self._announcement is not None:
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._announcement is not None:
            self._thread.join()
            self._announcement.close()

    @contextmanager
    def mpi_blocks(self) -> Iterator[None]:
        """Return a context in which a timeout exits the process: MPI itself waits forever."""
        self._mpi_blocks = True
        try:
            yield
        finally:
            self._mpi_blocks = False

    def give_up(self) -> HorovodInternalError:
        """Return the error of a rank that has waited for too long."""
        return self._wait.error(self._who())

    def _who(self) -> str:
        """Return which ranks have not called `init`, as far as this host can know."""
        if self._announcement is None or self._me is None or not self._me.job:
            return "some ranks have not called init()"
        me, host = self._me, f"this host ({socket.gethostname()})"
        present = self._announcement.present("rank", self.expected)
        missing = [rank for rank in self.expected if rank not in present]
        if not missing:
            return f"all ranks on {host} have called init(), and MPI has not connected them yet"
        if me.local_size == me.size:
            return f"{_ranks(missing)} on {host} {_have(missing)} not called init()"
        local = range(max(me.local_size, 0))
        absent = sorted(set(local) - set(self._announcement.present("local", local)))
        if absent and len(self.expected) == me.size:
            return f"local {_ranks(absent)} on {host} {_have(absent)} not called init()"
        return (
            f"{_ranks(present)} on {host} {_have(present)} called init(); of {_ranks(missing)}, "
            f"on other hosts, at least one has not, or cannot be reached"
        )

    def _speaks(self) -> bool:
        """Return whether this rank logs for its host: it is the lowest one present."""
        if self._announcement is None or self._me is None:
            return False
        return self._me.rank == min(self._announcement.present("rank", self.expected), default=-1)

    def _run(self) -> None:
        wait = self._wait
        while not self._over.wait(wait.seconds()):
            if wait.over:
                if self._mpi_blocks or time.monotonic() >= wait.deadline + GRACE_SECONDS:
                    self._end_process()
                self._over.wait(GRACE_SECONDS / 10)
            elif wait.line_is_due():
                who = self._who()
                if self._speaks():
                    wait.log(who)

    def _end_process(self) -> None:
        """Exit with an error message: no exception can reach a thread that waits in MPI."""
        error = self.give_up()
        report(error)
        log.critical("%s", error)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        os._exit(GAVE_UP)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
