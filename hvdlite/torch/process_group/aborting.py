"""`abort` of a process group: whatever waits for one of its collectives on this rank stops at once.

The collectives go on, as ranks that have not aborted count on this one: the engine has one order of
collectives for all ranks, out of which one rank alone can take nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

Wake = Callable[[], None]


class Abort:
    """Whether a group has been aborted, and whom to wake then."""

    def __init__(self) -> None:
        self.is_called = False
        # Guards both. Reentrant for signal handlers.
        self._lock = threading.RLock()
        self._wakes: dict[object, Wake] = {}

    def add(self, wake: Wake) -> object:
        """Have `wake`, which never waits, called by an abort; return what `forget` is given."""
        key = object()
        with self._lock:
            if not self.is_called:
                self._wakes[key] = wake
                return key
        wake()
        return key

    def forget(self, key: object) -> None:
        """Let go of what was added."""
        with self._lock:
            self._wakes.pop(key, None)

    def call(self) -> None:
        """Abort: wake all."""
        with self._lock:
            self.is_called = True
            wakes = list(self._wakes.values())
            self._wakes.clear()
        for wake in wakes:
            wake()
