"""What is done at a time unless it is forgotten before, as most deadlines are."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

Job = Callable[[], None]


class Deadlines:
    """Jobs with their times, and a thread that does those that are due.

    The thread looks at the times that it has slept for, also where the job is forgotten by then. So
    nobody wakes it in training, whose deadlines are all as far away as the first one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()  # Guards all of these.
        self._jobs: dict[object, tuple[float, Job]] = {}
        self._wakes = math.inf  # When the thread looks next.
        self._has_thread = False

    def add(self, seconds: float, job: Job) -> object:
        """Do `job`, which never waits, after `seconds`; return what `forget` is given."""
        key, until = object(), time.monotonic() + seconds
        with self._changed:
            self._jobs[key] = until, job
            if not self._has_thread:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._has_thread = True
            elif until < self._wakes:
                self._changed.notify()
        return key

    def forget(self, key: object) -> None:
        """Let go of a job."""
        with self._changed:
            self._jobs.pop(key, None)

    def _work(self) -> None:
        while True:
            for job in self._due():
                job()

    def _due(self) -> list[Job]:
        """Take the jobs that are due; without any, sleep until one may be, or may have come."""
        with self._changed:
            now = time.monotonic()
            due = [key for key, (until, _) in self._jobs.items() if until <= now]
            if not due:
                self._wakes = min((until for until, _ in self._jobs.values()), default=math.inf)
                self._changed.wait(waitable(self._wakes - now))
            return [self._jobs.pop(key)[1] for key in due]


def waitable(seconds: float) -> float:
    """Return a time that a lock can be waited for."""
    return min(max(seconds, 0.0), threading.TIMEOUT_MAX)


deadlines = Deadlines("hvdlite-deadlines")
