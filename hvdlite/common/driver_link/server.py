"""Accepts the workers of an elastic job: at their agent under hvdlite-run, else at the driver."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.frames import pack
from hvdlite.common.connections.link import Arrays, Link
from hvdlite.common.connections.listener import Listener, Refusal
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import FIRST_OWN, Claim, Party
from hvdlite.common.driver_link import frames
from hvdlite.common.meeting.wire import FRAME_BYTES

log = logging.getLogger("hvdlite")


class WorkerServer:
    """The connections of the workers that dial `listening`, which the server closes.

    ``said(number, message)`` is called in `loop` with each message of a worker, and
    ``ended(number)`` when the connection of a worker has ended. ``expects(number)`` says which
    workers may connect; by default all may that know the secret, each once at a time.
    """

    def __init__(
        self,
        loop: Loop,
        listening: socket.socket,
        secret: bytes,
        said: Callable[[int, list[Any]], None],
        ended: Callable[[int], None],
        *,
        expects: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self._loop, self._said, self._ended, self._expects = loop, said, ended, expects
        self._workers: dict[int, Link] = {}  # By number.
        self._listener = Listener(
            loop, [listening], Party(secret, frames.DRIVER, frames.WORKER), self._accept,
            judge=self._judge,
            refused=lambda code, why, claim: log.debug("a worker was refused: %s", why),
            other_secret="has another HVDLITE_SECRET than the job",
        )  # fmt: skip

    def send(self, number: int, message: Sequence[Any]) -> None:
        """Send a message to a worker; never blocks. Without effect where it is not connected."""
        self.send_head(number, pack(message))

    def send_head(self, number: int, head: bytes) -> None:
        """Send a packed message; see `send`."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.send_head(head)

    def numbers(self) -> list[int]:
        return list(self._workers)

    def silence(self) -> dict[int, float]:
        """Return for how many seconds each worker has sent nothing; a beat is due every second."""
        return {number: worker.silent_for() for number, worker in self._workers.items()}

    def hear_last_words(self, number: int) -> None:
        """Take all that a worker has sent whose process has ended."""
        worker = self._workers.get(number)
        if worker is not None:
            worker.read_all()

    def close(self) -> None:
        """Stop to listen, and close all connections; `ended` is not called."""
        self._listener.close()
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    # -- connections

    def _judge(self, claim: Claim) -> Refusal | None:
        number = frames.read_claim(claim.body)
        if number in self._workers:
            return Refusal(FIRST_OWN, f"worker {number} is connected already")
        if not self._expects(number):
            return Refusal(FIRST_OWN, f"worker {number} was given up, or is of another job")
        return None

    def _accept(self, claim: Claim, connection: socket.socket) -> None:
        number = frames.read_claim(claim.body)

        def received(message: list[Any], arrays: Arrays) -> None:
            if not frames.is_from_worker(message):
                raise ProtocolError(f"it sent {str(message)[:80]}")
            self._said(number, message)

        def ended(reason: str) -> None:
            if self._workers.pop(number).at_fault:
                log.warning("a connection from worker %d was closed: %s", number, reason)
            self._ended(number)

        self._workers[number] = Link(
            self._loop, connection, received=received, ended=ended, most_bytes=FRAME_BYTES
        )
