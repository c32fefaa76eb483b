"""The finalizer of a device: a thread that watches segments until the device has done them.

    engine thread   launch --Launched--> queue
    finalizer       event occurred: end the segment | the library reports an error: fail the engine

Segments of a device end in the order in which they were launched, as they share one stream.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.base import Members
from hvdlite.common.devices.communicators import quietly
from hvdlite.common.devices.interface import Communicator, Event
from hvdlite.common.requests.messages import Request
from hvdlite.common.transport.base import do_nothing

log = logging.getLogger("hvdlite")
SHORTEST_SLEEP, LONGEST_SLEEP = 50e-6, 2e-3  # Seconds between two looks at an event.
DRAIN_SECONDS = 5.0  # How long the end of a job waits for work that nobody waited for.
ABORT_SECONDS = 5.0  # How long it waits for work that was aborted.


class Launched(NamedTuple):
    """A segment whose work is queued on a stream."""

    event: Event
    communicator: Communicator
    what: str  # For errors: the collective and the name of its first tensor.
    end: Callable[[HorovodInternalError | None], None]  # Is called once, with the error if any.


class Finalizer:
    """Ends segments, in a thread that begins with the first one."""

    def __init__(
        self,
        name: str,
        on_error: Callable[[HorovodInternalError], None],
        begin_thread: Callable[[], None] = do_nothing,
    ) -> None:
        """Report an error of a library by `on_error`, which never waits.

        The thread calls `begin_thread` first.
        """
        self._name, self._on_error, self._begin_thread = name, on_error, begin_thread
        self._queue: queue.SimpleQueue[Launched | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # Set by `fail` where the job has failed: segments end when the device has left them.
        self._failure: HorovodInternalError | None = None
        self._until = 0.0  # Until when they wait for that.
        self._reported = False

    def add(self, launched: Launched) -> None:
        """Watch a segment. Engine thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._queue.put(launched)

    def fail(self, error: HorovodInternalError) -> None:
        """Let all segments fail that are not known to be done.

        Then abort all communicators, and call `close`.
        """
        self._until = time.monotonic() + DRAIN_SECONDS + ABORT_SECONDS
        self._failure = error

    def drain(self) -> bool:
        """End the thread when all is done; return whether that was so within `DRAIN_SECONDS`."""
        return self._joined(DRAIN_SECONDS)

    def close(self, record: Callable[[], Event]) -> None:
        """End the thread after `fail`, when the device has left what was aborted.

        `record` gives the event behind all that is queued, also after the last segment.
        """
        self._until = time.monotonic() + ABORT_SECONDS
        self._joined(DRAIN_SECONDS + ABORT_SECONDS)
        with suppress(Exception):  # A device that has failed records nothing.
            self._await_abort(record())

    def _joined(self, seconds: float) -> bool:
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join(seconds)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._begin_thread()
        except Exception as error:  # What is queued has to end all the same.
            log.debug("a thread begins without a device: %s: %s", type(error).__name__, error)
        while (launched := self._queue.get()) is not None:
            outcome = self._outcome(launched)
            if outcome is not None:
                self._await_abort(launched.event)
            launched.end(outcome)

    def _outcome(self, launched: Launched) -> HorovodInternalError | None:
        """Sleep until a segment is done; return why it is not, if so."""
        pause = SHORTEST_SLEEP
        while True:
            try:
                # An event also occurs when the library has given up: that is asked afterwards.
                done, reason = launched.event.query(), launched.communicator.async_error()
            except Exception as error:  # As torch raises what a device reports.
                done, reason = False, f"{type(error).__name__}: {error}"
            if self._failure is not None:
                return self._failure
            if reason:
                if not self._reported:
                    self._reported = True
                    self._on_error(HorovodInternalError(f"{launched.what}: {reason}"))
                return self._await_failure(launched, reason)
            if done:
                return None
            time.sleep(pause)
            pause = min(pause * 2, LONGEST_SLEEP)

    def _await_failure(self, launched: Launched, reason: str) -> HorovodInternalError:
        """Return the error by which the engine fails, which names the rank at fault."""
        until = time.monotonic() + DRAIN_SECONDS
        while self._failure is None and time.monotonic() < until:
            time.sleep(LONGEST_SLEEP)
        if self._failure is None:  # The engine is held up: what it would abort waits for nobody.
            quietly(launched.communicator.abort)
            self._until = time.monotonic() + ABORT_SECONDS
        return self._failure or HorovodInternalError(f"{launched.what}: {reason}")

    def _await_abort(self, event: Event) -> None:
        """Sleep until the device has left what is aborted, whose memory may be freed next."""
        with suppress(Exception):  # A device that has failed does nothing any more.
            while not event.query() and time.monotonic() < self._until:
                time.sleep(LONGEST_SLEEP)


def described(request: Request, members: Members) -> str:
    """Return how errors call a segment, by its first tensor."""
    return f"{request.collective} '{request.name}' on rank {members.ranks[members.index]}"


def ignore(error: HorovodInternalError) -> None:
    """Do nothing with an error: the engine has ended."""
