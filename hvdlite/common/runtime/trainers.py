"""Register trainers and traces, and connect them in whichever order they appear."""

from __future__ import annotations

import logging
import threading
from typing import Any, Protocol
from weakref import WeakSet

log = logging.getLogger("hvdlite")


class TraceLike(Protocol):
    """The interface of an iteration trace."""

    def follow(self, trainer: Any) -> None:
        """Record the iterations of a trainer from now on."""

    def enter(self, runtime: Any) -> None:
        """Go on in another world of an elastic job, that of `runtime`."""

    def stop(self) -> None:
        """Record nothing any more; idempotent."""


class Trainers:
    """The trainers of one rank, such as optimizers, and the traces that follow each of them."""

    def __init__(self) -> None:
        # The trace that the settings ask for; None until it is switched on.
        self.by_setting: TraceLike | None = None
        # Guards the next two, so that no pair of trainer and trace is missed.
        self._lock = threading.RLock()
        self._trainers: WeakSet[Any] = WeakSet()
        self._traces: list[TraceLike] = []

    def announce(self, trainer: Any) -> None:
        """Register a trainer, and let all traces follow it."""
        with self._lock:
            self._trainers.add(trainer)
            traces = list(self._traces)
        for trace in traces:
            trace.follow(trainer)

    def add(self, trace: TraceLike) -> None:
        """Register a trace, and let it follow all trainers."""
        with self._lock:
            self._traces.append(trace)
            trainers = list(self._trainers)
        for trainer in trainers:
            trace.follow(trainer)

    def enter(self, runtime: Any) -> None:
        """Let all traces go on in the world of `runtime`. Raises `OSError`."""
        with self._lock:
            traces = list(self._traces)
        for trace in traces:
            trace.enter(runtime)

    def remove(self, trace: TraceLike) -> None:
        """Forget a trace that was stopped; idempotent."""
        with self._lock:
            if trace in self._traces:
                self._traces.remove(trace)

    def close(self) -> None:
        """Stop all traces at shutdown; a file that cannot be written does not stop the shutdown."""
        for trace in list(self._traces):
            try:
                trace.stop()
            except OSError as error:
                log.warning("an iteration trace could not be completed: %s", error)
