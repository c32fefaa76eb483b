"""The iteration trace: one row for every iteration of this rank, on a clock that all ranks share.

    training and engine thread   see following.py
    writer thread                iterations with their reductions -> rows -> file

An iteration costs a few clock readings and one append: the writer makes the rows and writes them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from contextlib import suppress
from typing import Any

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.iterations.following import Following
from hvdlite.common.iterations.marks import IterationMarks
from hvdlite.common.iterations.rows import (
    IterationRow,
    IterationTimes,
    RowsFile,
    SegmentTimes,
    check_path,
    make_row,
    open_rows,
)
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.runtime import Runtime

FLUSH_SECONDS = 0.2  # how long iterations gather before they are written
MOST_ROWS = 50_000  # the rows that `IterationTrace.rows` remembers: some 50 MB

log = logging.getLogger("hvdlite")


class IterationTrace(Following):
    """A running trace, from `trace_iterations`. Stop it, or use it as a context manager."""

    def __init__(self, runtime: Runtime, path: str | None) -> None:
        """Begin to trace; raise as `trace_iterations`."""
        if path is not None:
            check_path(path)
        super().__init__(runtime)
        # Set until the file is opened: a newcomer of an elastic job learns its rank later.
        self._path_to_open = path
        self._file: RowsFile | None = None
        self._open_file()
        self._lock = threading.RLock()  # Guards _rows and _file; taken before that of `settle`.
        self._made: list[IterationRow] = []  # Since the last ones were written.
        self._rows: deque[IterationRow] = deque(maxlen=MOST_ROWS)
        self._count = 0
        self._last_end: float | None = None
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._on_end = self._wake_writer
        self._writer = threading.Thread(target=self._write, name="hvdlite-trace", daemon=True)
        self._writer.start()
        self._begin()

    # -- for the user

    def rows(self) -> list[IterationRow]:
        """Return the rows of this rank until now, of its last 50,000 iterations at most."""
        with self._lock:
            self._make_rows()
            return list(self._rows)

    def gather(self) -> list[IterationRow]:
        """Return the rows of all ranks, by iteration and rank; every rank must call this.

        Raises `HorovodInternalError` when a rank is lost, and after `shutdown`.
        """
        of_ranks = allgather_object(self.rows(), "trace_iterations.gather")
        return sorted((row for rows in of_ranks for row in rows), key=lambda row: row[:2])

    def stop(self) -> None:
        """End the trace and complete the file; idempotent.

        Raises `OSError` when a Parquet file cannot be written.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._end()
        self._wake.set()
        self._writer.join()
        with self._lock:
            self._make_rows()
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def __enter__(self) -> IterationTrace:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    # -- for trainers and the engine

    def enter(self, runtime: Runtime) -> None:
        """Go on in another world of an elastic job, whose ranks are others. Raises `OSError`."""
        with self._lock:
            self._make_rows()  # They are of the world before.
            super().enter(runtime)
            self._open_file()

    def _open_file(self) -> None:
        recording = self._runtime.recording
        if self._path_to_open is not None and recording.in_world:
            path, self._path_to_open = self._path_to_open, None
            self._file = open_rows(recording.new_file(path, of_rank=True))

    def _wake_writer(self) -> None:
        if not self._wake.is_set():
            self._wake.set()

    def _put(self, times: IterationTimes, runs: list[SegmentRun]) -> None:
        segments = [SegmentTimes(run.start, run.end, run.bytes) for run in runs]
        iteration, previous_end = self._count, self._last_end
        self._count, self._last_end = iteration + 1, times.iteration_end
        rank, shift = self._runtime.rank, self._runtime.engine.clock_offset_seconds
        self._made.append(make_row(iteration, rank, times, segments, previous_end, shift))

    # -- rows

    def _write(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()  # First: a stop from here on is seen below, or wakes it again.
            if self._stopping.wait(FLUSH_SECONDS):  # more iterations gather meanwhile
                return
            with self._lock:
                self._make_rows()

    def _make_rows(self) -> None:
        with self._settling:
            self.settle()
            made, self._made = self._made, []
        self._rows.extend(made)
        if self._file is None or not made:
            return
        try:
            self._file.append(made)
        except OSError as error:  # for example a full disk: training goes on
            log.warning("the iteration trace %s ends here: %s", self._file.path, error.strerror)
            with suppress(OSError):
                self._file.close()
            self._file = None


def trace_iterations(path: str | None = None) -> IterationTrace:
    """Trace all iterations of this rank from now on, until the trace is stopped.

    `path` is a file that every rank writes, ``.csv`` or ``.parquet``; ``.rank<N>`` is put before
    the suffix. CSV grows while training goes on, Parquet is written by ``stop()``. The iterations
    of a `DistributedOptimizer` of PyTorch, and those of a distributed Keras model, are traced
    automatically; other loops use ``with trace.iteration():``. Several traces can run at once.

    Raises `ValueError` for another suffix and before `init`, `OSError` when the file cannot be
    written, and `ImportError` for Parquet without pyarrow.
    """
    return IterationTrace(current(), path)


def announce(trainer: Any) -> None:
    """Register a `Trainer`, which all traces follow; the first one starts the settings' trace.

    The trainer is not kept alive. Raises as `trace_iterations`, for the file of the settings.
    """
    current().trainers.announce(trainer)
    trace_by_setting()


def trace_by_setting() -> IterationTrace | None:
    """Return the trace that the settings ask for, begun by the first call; None without one.

    Raises as `trace_iterations`.
    """
    runtime = current()
    trainers = runtime.trainers
    path = trainers.path_by_setting(runtime.config)
    if path and trainers.by_setting is None:
        trainers.by_setting = IterationTrace(runtime, path)
    trace = trainers.by_setting
    assert trace is None or isinstance(trace, IterationTrace)
    return trace


__all__ = ["IterationMarks", "IterationTrace", "trace_iterations"]
