"""A worker's side of the connection to the driver of its job, for the life of the process.

One thread reads and writes, so that regroups end waits, notices are answered and beats are sent
whatever the script does. The end of the connection ends the process: without a driver there is no
next world.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.connections.address import Address, parse_address
from hvdlite.common.connections.dial import Failure, Limits, Refused, reach
from hvdlite.common.connections.link import Link
from hvdlite.common.connections.loop import Loop, lasting
from hvdlite.common.connections.prove import Party
from hvdlite.common.driver_link import frames
from hvdlite.common.driver_link.checks import Checks
from hvdlite.common.driver_link.frames import Newcomer, World
from hvdlite.common.driver_link.process_end import ProcessEnd
from hvdlite.common.meeting import wire

CONNECT_SECONDS = 30.0  # The driver listens before it starts its first worker.
LINE_SECONDS = 10.0  # The time between two lines of a worker that waits.
BYE_SECONDS = 1.0  # How long the last frames may take to be sent.

log = logging.getLogger("hvdlite")


def _dial(loop: Loop, address: Address, number: int, secret: bytes) -> socket.socket:
    """Return the connection of worker `number` to the driver at `address`; it runs `loop`.

    Raises `HorovodInternalError` when the driver cannot be reached or refuses this worker, and
    `HorovodVersionMismatchError`.
    """
    end = loop.now() + CONNECT_SECONDS

    def limits() -> Limits:
        left = max(0.001, end - loop.now())
        return Limits(left, left)

    def failed(failures: list[Failure]) -> None:
        for _, error, _ in failures:
            if isinstance(error, HorovodVersionMismatchError):
                raise error
            if isinstance(error, Refused):
                raise HorovodInternalError(
                    f"the driver of the job at {address} refuses: {error}"
                ) from error
        error = failures[-1].error
        if loop.now() > end or isinstance(error, (FileNotFoundError, ProtocolError)):
            raise HorovodInternalError(
                f"worker {number} cannot reach the driver of the job at {address} ({error}): "
                "it has ended, or HVDLITE_ELASTIC_DRIVER is that of another job"
            ) from error

    me = Party(secret, frames.WORKER, frames.DRIVER)
    return reach(loop, [address], me, frames.claim(number), limits, failed)


class LinkExchange:
    """See `Exchange`; ``gather(epoch, number, body)`` returns the bodies of a round."""

    def __init__(self, world: World, gather: Callable[[int, int, bytes], list[bytes]]) -> None:
        self.rank, self.size = world.rank, world.size
        self._epoch, self._gather = world.epoch, gather
        self._round = 0

    def allgather(self, body: bytes) -> list[bytes]:
        """See `Exchange.allgather`. There is no limit: the driver ends a world that cannot meet."""
        wire.check_body(body)
        number, self._round = self._round, self._round + 1
        return self._gather(self._epoch, number, bytes(body))

    def close(self) -> None:
        """See `Exchange.close`."""


class DriverLink:
    """The connection of worker `number` to the driver at `address`; `secret` is the job's.

    Raises `HorovodInternalError` when the driver cannot be reached or refuses the worker.
    """

    def __init__(self, address: str, number: int, secret: bytes) -> None:
        self.number = number
        # Called on the link thread: with the epoch and the error when a world is over (0 when the
        # driver has gone: every world is), and with counter and kind when hosts have changed.
        self.on_regroup: Callable[[int, HorovodInternalError], None] = lambda epoch, error: None
        self.on_seen: Callable[[int, int], None] = lambda counter, kind: None
        self._process_end = ProcessEnd()
        # Called on the link thread with the exit code when the driver has gone.
        self.on_lost: Callable[[int], None] = partial(
            self._process_end.begin, is_ending=lambda: self._closing
        )
        # Guards all below that two threads use, and tells of changes. Reentrant, as signal handlers
        # may use the link.
        self._changed = threading.Condition()
        self._offer: World | Newcomer | None = None
        self._epoch = 0  # Of the last world that was offered.
        self._over: HorovodInternalError | None = None  # Why that world is over.
        self._bodies: tuple[int, int, list[bytes]] | None = None
        self._checks = Checks()
        self._end: tuple[int, str] | None = None  # The exit code, and why there is no next world.
        self._closing: bool = False
        driver = parse_address(address, "HVDLITE_ELASTIC_DRIVER")
        self._loop = Loop()
        try:
            connection = _dial(self._loop, driver, number, secret)
        except BaseException:
            self._loop.close()
            raise
        self._link = Link(
            self._loop, connection, received=lambda message, arrays: self._obey(message),
            ended=self._on_closed, most_bytes=wire.FRAME_BYTES, beat_seconds=frames.BEAT_SECONDS,
        )  # fmt: skip
        # Readable while the world that was offered last is over.
        self._interrupt = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="hvdlite-elastic", daemon=True)
        lasting.add(self)
        self._thread.start()
        self._link.send(frames.HELLO, os.getpid())

    # -- called by the script's thread

    def ready(self, epoch: int, commit: int) -> None:
        """Ask for the next world; `epoch` was the last one, and the worker holds `commit`."""
        self._link.send(frames.READY, epoch, commit)

    def tell_late(self, epoch: int, numbers: Sequence[int]) -> None:
        """Tell which workers the others of the world `epoch` have waited for too long."""
        self._link.send(frames.LATE, epoch, list(numbers))

    def tell_error(self, epoch: int, text: str) -> None:
        """Tell by which error this worker leaves the world `epoch`, of which no rank was lost."""
        self._link.send(frames.ERROR, epoch, text)

    def wait_for_world(self) -> World | Newcomer:
        """Return the next world, or the expected place if the answer to the hello says to wait.

        Says every 10 s that it waits. Raises `SystemExit` where no world will come.
        """
        with self._changed:
            self._wait(lambda: self._offer is not None, "the next world of the job")
            offer, self._offer = self._offer, None
            assert offer is not None  # The wait has ended for this.
            return offer

    def check(self) -> int | None:
        """Pass a check of the world; return the kind of the change if the script is interrupted.

        See [Note: agreement on a check] in checks.py. Raises `HorovodInternalError` where the world
        is over, and `SystemExit` where the job is.
        """
        with self._changed:
            if self._checks.held or self._over is not None:
                self._wait(
                    lambda: not self._checks.held or self._over is not None,
                    "the driver's decision on the next world",
                )
                self._raise_if_over(self._epoch)
            return self._checks.enter()

    def exchange(self, world: World) -> LinkExchange:
        """Return the exchange by which the ranks of `world` meet."""
        return LinkExchange(world, self.gather)

    def over(self, epoch: int) -> HorovodInternalError | None:
        """Return why the world `epoch` is over, None while it is not."""
        with self._changed:
            if epoch == self._epoch:
                return self._over
            return HorovodInternalError(f"the world {epoch} is over: world {self._epoch} began")

    def wait_until_over(self, epoch: int, seconds: float) -> bool:
        """Return whether the world is over, after at most `seconds`. Raises `SystemExit`."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._over is not None or epoch != self._epoch or self._end is not None,
                seconds,
            )
            self._raise_if_ended()
            return self._over is not None or epoch != self._epoch

    def gather(self, epoch: int, number: int, body: bytes) -> list[bytes]:
        """Return the bodies of round `number`; `HorovodInternalError` if the world is over."""
        self._link.send(frames.GATHER, epoch, number, body)

        def answered() -> bool:
            return self._bodies is not None and self._bodies[:2] == (epoch, number)

        with self._changed:
            self._wait(
                lambda: answered() or self._over is not None or epoch != self._epoch,
                f"all ranks of world {epoch} (round {number} of their meeting)",
            )
            if not answered():
                self._raise_if_over(epoch)
            assert self._bodies is not None  # It is answered.
            bodies, self._bodies = self._bodies[2], None
            return bodies

    def fileno(self) -> int:
        """Return a descriptor that can be read while the world that was offered last is over."""
        return self._interrupt

    def raise_if_over(self) -> None:
        """Raise `HorovodInternalError` if the world that was offered last is over."""
        with self._changed:
            self._raise_if_over(self._epoch)

    def close(self) -> None:
        """End the connection, as this process ends."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
        self._loop.post(self._say_bye)
        self._thread.join()
        lasting.discard(self)
        self._process_end.cancel()
        self._close_descriptors()

    def _say_bye(self) -> None:
        self._link.send(frames.BYE)
        self._link.leave(BYE_SECONDS)

    def after_fork_in_child(self) -> None:
        """Close this process's copies of all descriptors."""
        self._link.close_after_fork()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        self._loop.close()
        os.close(self._interrupt)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait with the lock held. Raises `SystemExit` where the job is over."""
        began = time.monotonic()
        self._raise_if_ended()
        while not self._changed.wait_for(lambda: condition() or self._end is not None,
                                         LINE_SECONDS):  # fmt: skip
            seconds = time.monotonic() - began
            log.warning("worker %d has waited %.0f s for %s", self.number, seconds, what)
        self._raise_if_ended()

    def _raise_if_over(self, epoch: int) -> None:
        error = self.over(epoch)
        if error is not None:
            raise HorovodInternalError(str(error), rank=error.rank)

    def _raise_if_ended(self) -> None:
        if self._end is not None:
            code, sentence = self._end
            if code and sentence:
                print(sentence, file=sys.stderr, flush=True)
                self._end = code, ""  # It is printed once.
            raise SystemExit(code)

    # -- the thread

    def _run(self) -> None:
        try:
            while self._link.open:
                self._loop.run_once()
        except Exception as error:
            log.exception("the link of worker %d to its driver failed", self.number)
            self._link.close()
            self._on_closed(str(error))

    def _obey(self, message: list[Any]) -> None:
        match message:
            case [frames.BODIES, int(epoch), int(number), [*bodies]]:
                with self._changed:
                    self._bodies = epoch, number, bodies
                    self._changed.notify_all()
            case [frames.REGROUP, int(epoch), str(sentence), rank]:
                self._on_regroup(epoch, HorovodInternalError(sentence, rank=rank))
            case [frames.SEEN, int(counter), int(kind)]:
                self.on_seen(counter, kind)
            case [frames.NOTICE, int(counter), int()]:
                with self._changed:
                    self._checks.hold(counter)
                    self._link.send(frames.CHECKS, counter, self._checks.passed)
            case [frames.RAISE, int(counter), int(check), int(kind)]:
                with self._changed:
                    self._checks.decide(counter, check, kind)
                    self._changed.notify_all()
            case [frames.END, int(code), str(sentence)]:
                log.log(logging.INFO if code == 0 else logging.DEBUG, "%s", sentence)
                with self._changed:
                    self._end = code, sentence
                    self._changed.notify_all()
            case [frames.WORLD, *_]:
                self._on_world(frames.read_world(message, self.number))
            case [frames.NEWCOMER, *_]:
                with self._changed:
                    self._offer = frames.read_newcomer(message)
                    self._changed.notify_all()
            case _:
                raise ProtocolError(f"the driver of the job sent {str(message)[:80]}")

    def _on_world(self, world: World) -> None:
        with self._changed:
            if world.epoch <= self._epoch:
                return
            self._epoch, self._offer, self._over, self._bodies = world.epoch, world, None, None
            self._checks = Checks()
            self._link.frames.most_bytes = wire.longest_answer(world.size)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._interrupt)
            self._changed.notify_all()

    def _on_regroup(self, epoch: int, error: HorovodInternalError) -> None:
        with self._changed:
            if epoch != self._epoch or self._over is not None:
                return
            self._set_over(error)
        self.on_regroup(epoch, error)

    def _set_over(self, error: HorovodInternalError) -> None:
        self._over = error
        os.eventfd_write(self._interrupt, 1)
        self._changed.notify_all()

    def _on_closed(self, reason: str) -> None:
        """End all waits, and this process: by `SystemExit` in its main thread, or without it."""
        if self._closing:
            return
        with self._changed:
            if self._end is None:
                reason = reason or "it closed the connection"
                text = f"worker {self.number}: the driver of the job has gone ({reason})"
                print(f"{text}: this worker ends", file=sys.stderr, flush=True)
                self._end = 1, ""
            code, _ = self._end
            error = HorovodInternalError("the driver of the job has gone")
            if self._over is None:
                self._set_over(error)
            self._changed.notify_all()
        self.on_regroup(0, error)
        self.on_lost(code)
