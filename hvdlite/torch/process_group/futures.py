"""Futures of collectives, whose callbacks run in threads that may wait for other collectives.

A hook of DDP such as PowerSGD's starts a collective in the callback of another one and waits for
it. In the engine's thread that would never end, so each future is settled by a thread of a pool,
which grows while all of its threads are busy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

Job = Callable[[], None]


class Pool:
    """Threads that do jobs in order of arrival; a job never waits for another one to end."""

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
