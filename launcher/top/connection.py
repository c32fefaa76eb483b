"""The running jobs of this user on this host, and the connection with one of them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Sequence
from typing import Any

from hvdlite.common.base.errors import ConfigError, HorovodVersionMismatchError
from hvdlite.common.connections.address import Address
from hvdlite.common.connections.dial import Failure, Limits, Refused, reach
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.prove import Party
from hvdlite.common.connections.strangers import why
from hvdlite.launcher.inspection import runtime_folder
from hvdlite.launcher.inspection.asking import Answer
from hvdlite.launcher.inspection.service import ASK, LAUNCHER, NO_SECRET, VIEWER
from hvdlite.launcher.processes.event_loop import EventLoop

REACH_SECONDS = 3.0
MOST_BYTES = 1 << 26  # Of an answer: 16,384 ranks have some 6 MB.
Done = Callable[[Answer], None]


class Unreachable(Exception):  # noqa: N818 - the job is, and no error of ours
    """A job that runs cannot be asked."""


class JobConnection:
    """Asks one job; ``ended()`` is called when that is over, for a `reason` or as the job ends."""

    def __init__(self, loop: EventLoop, path: str) -> None:
        """Connect with the job whose socket is at `path`. Raises `Unreachable`."""
        self.path = path
        self.ended: Callable[[], None] = lambda: None
        self.reason = ""
        self._loop = loop
        self._open: dict[int, Done] = {}
        self._numbers = itertools.count(1)

        def failed(failures: list[Failure]) -> None:
            error = failures[-1].error
            said = isinstance(error, (Refused, HorovodVersionMismatchError))
            raise Unreachable(str(error) if said else why(error))

        connection = reach(
            loop, [Address(path=path)], Party(NO_SECRET, VIEWER, LAUNCHER), b"",
            lambda: Limits(REACH_SECONDS, REACH_SECONDS), failed,
        )  # fmt: skip
        self._link = Link(
            loop, connection, most_bytes=MOST_BYTES, ended=self._end,
            received=lambda message, arrays: self._received(message),
        )  # fmt: skip

    @property
    def open(self) -> bool:
        """Whether the job can still be asked."""
        return self._link.open

    @property
    def end(self) -> str:
        """Why it cannot, as what is said of the job."""
        return f"cannot be asked any more: {self.reason}" if self.reason else "has ended"

    def _end(self, reason: str) -> None:
        # A job that ends removes its socket, and may do so with a question that it has not read:
        # the connection is reset then.
        self.reason = reason if os.path.exists(self.path) else ""
        self.ended()

    def ask(self, request: Sequence[Any], done: Done) -> None:
        """Call `done` with the answer; see requests.py."""
        number = next(self._numbers)
        self._open[number] = done
        self._link.send(ASK, number, *request)

    def ask_now(self, request: Sequence[Any]) -> Answer:
        """Return the answer. Raises `Unreachable` without one within some seconds."""
        answers: list[Answer] = []
        self.ask(request, answers.append)
        end = self._loop.now() + REACH_SECONDS
        while not answers and self._link.open and (left := end - self._loop.now()) > 0:
            self._loop.run_once(left)
        if not answers:
            raise Unreachable("does not answer" if self.open else self.end)
        return answers[0]

    def _received(self, message: list[Any]) -> None:
        match message:
            case ["answer", int(number), dict(answer)] if number in self._open:
                self._open.pop(number)(answer)

    def close(self) -> None:
        """Ask no more."""
        self._link.close()


def find_jobs(known: Container[str] = ()) -> tuple[list[str], list[str]]:
    """Return the sockets of running jobs but the `known` ones, and why a folder was left out."""
    found, refused = [], []
    for folder in runtime_folder.folders():
        try:
            runtime_folder.check_folder(folder)
            found += runtime_folder.remove_stale(folder, known)
        except ConfigError as error:
            refused.append(str(error))
        except OSError:  # There is none, so no job listens there.
            continue
    return found, refused
