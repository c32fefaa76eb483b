"""Who has iterations on this rank, and who watches them; they may come in any order."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol
from weakref import WeakSet

log = logging.getLogger("hvdlite")


class TraceLike(Protocol):
    """What is told of iterations, until it is stopped."""

    def follow(self, trainer: Any) -> None:
        """Watch the iterations of a trainer from now on."""

    def stop(self) -> None:
        """Watch nothing any more; nothing happens the second time."""


class Trainers:
    """The trainers of one rank, such as optimizers, and the traces that follow each of them."""

    def __init__(self) -> None:
        self.by_setting: TraceLike | None = None  # the one that the settings ask for, once it is on
        self._lock = threading.RLock()  # guards the two
        self._trainers: WeakSet[Any] = WeakSet()
        self._traces: list[TraceLike] = []

    def announce(self, trainer: Any) -> None:
        """A trainer has come."""
        with self._lock:
            self._trainers.add(trainer)
            traces = list(self._traces)
        for trace in traces:
            trace.follow(trainer)

    def add(self, trace: TraceLike) -> None:
        """A trace has been switched on."""
        with self._lock:
            self._traces.append(trace)
            trainers = list(self._trainers)
        for trainer in trainers:
            trace.follow(trainer)

    def remove(self, trace: TraceLike) -> None:
        """A trace has been stopped; nothing happens the second time."""
        with self._lock:
            if trace in self._traces:
                self._traces.remove(trace)

    def close(self) -> None:
        """Stop all traces, when the rank leaves the job; that goes on where a file cannot."""
        for trace in list(self._traces):
            try:
                trace.stop()
            except OSError as error:
                log.warning("an iteration trace could not be completed: %s", error)
