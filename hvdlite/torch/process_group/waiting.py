"""Whom a work wakes, and when: futures with threads of their own, deadlines, and an abort."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Job = Callable[[], None]


class Pool:
    """Threads that do jobs in order of arrival; a job never waits for another one to end.

    The callbacks of futures run in them: a hook of DDP such as PowerSGD's starts a collective in
    the callback of another one and waits for it. In the engine's thread that would never end, so
    each future is settled by a thread of a pool, which grows while all of its threads are busy.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._lock = threading.Lock()  # Guards `_free`.
        self._free = 0  # Threads that wait for a job, less the jobs that wait for a thread.

    def run(self, job: Job) -> None:
        """Do a job in a thread of the pool; never waits."""
        with self._lock:
            self._free -= 1
            start = self._free < 0
            if start:
                self._free += 1
        if start:
            threading.Thread(target=self._work, args=(job,), name=self._name, daemon=True).start()
        else:
            self._jobs.put(job)

    def _work(self, job: Job) -> None:
        while True:
            job()
            del job  # It holds tensors, and the next one may come late.
            with self._lock:
                self._free += 1
            job = self._jobs.get()


pool = Pool("hvdlite-futures")


def future_of(
    result: Callable[[], Any], on_end: Callable[[Job], None], gpus: Sequence[torch.device] = ()
) -> Any:
    """Return a future of ``result()``, which a thread of the pool calls when the work has ended.

    `on_end` is given what to call then. On `gpus`, which hold parts of the result, whoever waits
    for the future has the current streams wait for those of that thread.

    An error of `result` becomes that of the future, for C++ as well: torch's own `set_exception` is
    a value that raises in Python only.
    """
    ended: Any = torch.futures.Future(devices=list(gpus))
    future = ended.then(lambda _: result())
    on_end(lambda: pool.run(lambda: ended.set_result(None)))
    return future


class Deadlines:
    """Jobs that are done at a time unless they are forgotten before, as most deadlines are.

    Their thread looks at the times that it has slept for, also where the job is forgotten by then.
    So nobody wakes it in training, whose deadlines are all as far away as the first one.
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


class Abort:
    """Whether a group has been aborted, and whom to wake then: all that waits on this rank.

    The collectives go on, as ranks that have not aborted count on this one: the engine has one
    order of collectives for all ranks, out of which one rank alone can take nothing.
    """

    def __init__(self) -> None:
        self.is_called = False
        # Guards both. Reentrant for signal handlers.
        self._lock = threading.RLock()
        self._wakes: dict[object, Job] = {}

    def add(self, wake: Job) -> object:
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
