"""Compressed exchanges that run by themselves, for frameworks whose threads cannot drive them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.gradients.compressed_bucket import RUNNER, Bucket, FeedbackState, Part
from hvdlite.common.gradients.compressed_exchange import CompressedBucket
from hvdlite.common.requests.handles import Handle
from hvdlite.common.runtime.current import for_collective, use
from hvdlite.common.runtime.runtime import Runtime


@dataclass
class _Running:
    parts: Sequence[Part]
    handle: Handle
    runtime: Runtime
    first: tuple[str, tuple[int, ...], str]
    bucket: CompressedBucket | None = None


class BackgroundExchange:
    """The compressed exchanges of one optimizer on one rank.

    A thread lives while some are in flight. It waits for no collective, but for the first one of an
    era: whatever order the ranks' graphs run in, what has arrived is worked on.
    """

    def __init__(self, state: FeedbackState, reduction: ReductionConfig) -> None:
        self.state = state
        self._reduction = reduction
        self._lock = threading.Condition()
        self._ready: deque[_Running] = deque()
        self._open = 0  # exchanges that have not ended
        self._works = False  # whether there is a thread
        self._refused: tuple[object, Exception] | None = None  # the era in which ranks disagreed

    def submit(
        self, parts: Sequence[Part], runtime: Runtime, first: tuple[str, tuple[int, ...], str]
    ) -> Handle:
        """Exchange a bucket, whose results are written to `parts` when the handle is complete.

        `first` are the name, the shape and the dtype of the first gradient of all buckets of the
        optimizer. A rank that does not compress sends it, and so it learns who does.
        """
        running = _Running(parts, Handle(), runtime, first)
        with self._lock:
            self._ready.append(running)
            self._open += 1
            starts, self._works = not self._works, True
            self._lock.notify()
        if starts:
            name = "hvdlite-compression"
            threading.Thread(target=self._work, name=name, daemon=True).start()
        return running.handle

    def _work(self) -> None:
        while True:
            with self._lock:
                while not self._ready and self._open:
                    self._lock.wait()
                if not self._ready:  # All exchanges have ended.
                    self._works = False
                    return
                running = self._ready.popleft()
            with use(running.runtime):
                self._advance(running)

    def _advance(self, running: _Running) -> None:
        try:
            if running.bucket is None:
                self._begin(running.first)
                bucket = Bucket.of(running.parts, self.state, self._reduction)
                running.bucket = CompressedBucket(bucket)
            else:
                running.bucket.advance()
            operation = running.bucket.operation
            if operation is not None:
                operation.entries[0].handle.on_end(lambda: self._put(running))
                return
        except Exception as error:
            self._end()
            running.handle.fail(error)
            return
        self._end()
        running.handle.complete()

    def _put(self, running: _Running) -> None:
        with self._lock:
            self._ready.append(running)
            self._lock.notify()

    def _end(self) -> None:
        with self._lock:
            self._open -= 1
            self._lock.notify()

    def _begin(self, first: tuple[str, tuple[int, ...], str]) -> None:
        """Agree with other ranks if an era has begun: on the compressor, then on what is shared."""
        if self.state.begun:
            return
        era = for_collective().era(self.state.process_set)
        if self._refused is not None and self._refused[0] is era:
            raise self._refused[1]  # The others have failed as well, and send nothing any more.
        name, shape, dtype = first
        options = self._reduction.options._replace(settings=self._reduction.compression_label)
        try:
            RUNNER.run("allreduce", [np.zeros(shape, dtype)], name, options)
        except HorovodInternalError as error:
            self._refused = era, error
            raise
        self.state.begin(name)
