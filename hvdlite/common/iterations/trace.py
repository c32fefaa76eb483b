"""The iteration trace: one row for every iteration of this rank, on a clock that all ranks share.

    training thread      Steps (of an optimizer), Iteration (a block) -> Marks -> a queue
    engine thread        gradients that have travelled                -> with them
    writer thread        rows from what is in the queue, into the file

An iteration costs a few clock readings and one append: rows are made, and written, by the writer.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakMethod, finalize

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.iterations.files import RowsFile, check_path, open_rows
from hvdlite.common.iterations.marks import Iteration, Steps
from hvdlite.common.iterations.rows import IterationRow, Marks, SegmentTimes, make_row
from hvdlite.common.plain.entries import SegmentRun
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import current
from hvdlite.common.timeline.recorder import path_of_rank

FLUSH_SECONDS = 0.2  # how long iterations gather before they are written
MOST_ROWS = 50_000  # that `IterationTrace.rows` remembers: some 50 MB
REDUCTIONS = ("allreduce", "reducescatter")
NO_GRADIENT = "allreduce.trainable_parameters."  # begins a name: which of them some rank has

log = logging.getLogger("hvdlite")


class Trainer(Protocol):
    """What has iterations that can be seen without help, such as a distributed optimizer."""

    def trace_steps(self, steps: Steps) -> Callable[[], None]:
        """Tell `steps` of every iteration, until what this returns is called."""

    def gradient_names(self) -> Collection[str]:
        """The names under which its gradients travel; asked after each step."""


class IterationTrace:
    """What `trace_iterations` returns. Stop it, or use it as a context manager."""

    def __init__(self, runtime: Runtime, path: str | None) -> None:
        """Raises as `trace_iterations`."""
        self._runtime = runtime
        self._file: RowsFile | None = None
        if path is not None:
            check_path(path)
            self._file = open_rows(path_of_rank(path, runtime.rank))
        self._lock = threading.RLock()  # guards what makes rows, and the file
        self._ended: deque[tuple[Marks, list[SegmentRun]]] = deque()  # and no row made of it yet
        self._rows: deque[IterationRow] = deque(maxlen=MOST_ROWS)
        self._count = 0
        self._last_end: float | None = None
        self._following: list[Steps] = []
        self._detach: list[Callable[[], object]] = []
        self._block: Iteration | None = None
        self._wake, self._stopping = threading.Event(), threading.Event()
        self._writer = threading.Thread(target=self._write, name="hvdlite-trace", daemon=True)
        self._writer.start()
        self._detach.append(runtime.engine.observe(self._on_run))
        runtime.trainers.add(self)

    # -- of the user

    def iteration(self) -> Iteration:
        """A block that is one iteration, for a loop that hooks cannot see.

        ``with trace.iteration() as it:`` and in it ``it.forward_done()``, ``it.backward_done()``
        and ``it.reduced()`` where that is; each may be left out. All reductions that end in the
        block belong to it; with a distributed optimizer of PyTorch only those of its gradients. A
        block that raises makes no row. Raises `RuntimeError` inside another such block.
        """
        return Iteration(self._enter, self._leave)

    def rows(self) -> list[IterationRow]:
        """The rows of this rank until now, of its last 50,000 iterations at most."""
        with self._lock:
            self._make_rows()
            return list(self._rows)

    def gather(self) -> list[IterationRow]:
        """The rows of all ranks, by iteration and rank; every rank calls this alike, and blocks.

        Raises `HorovodInternalError` when a rank is lost, and after `shutdown`.
        """
        of_ranks = allgather_object(self.rows(), "trace_iterations.gather")
        return sorted((row for rows in of_ranks for row in rows), key=lambda row: row[:2])

    def stop(self) -> None:
        """Trace nothing any more, and complete the file; nothing happens the second time.

        Raises `OSError` when a Parquet file cannot be written.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        self._runtime.trainers.remove(self)
        for detach in self._detach:
            detach()
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

    # -- of what it watches

    def follow(self, trainer: Trainer) -> None:
        """Watch the iterations of `trainer` from now on; it is not kept alive."""
        names = WeakMethod(trainer.gradient_names)
        steps = Steps(lambda: ask() if (ask := names()) else (), self._on_step)
        self._following.append(steps)
        gone = finalize(trainer, self._following.remove, steps)
        self._detach += [gone.detach, trainer.trace_steps(steps)]

    def _on_run(self, run: SegmentRun) -> None:
        """The engine's thread, before anybody learns that the segment has run."""
        takers = [steps for steps in self._following if steps.takes(run)]
        if takers:
            self._taker(takers).runs.append(run)
            return
        block = self._block
        if block is None or self._following or run.collective not in REDUCTIONS:
            return
        if not all(name.startswith(NO_GRADIENT) for name in run.names):
            block.runs.append(run)

    def _taker(self, takers: list[Steps]) -> Steps:
        """Where several trainers have gradients of one name: the one that is in an iteration."""
        if len(takers) == 1:
            return takers[0]
        return max(takers, key=lambda steps: steps.bp_end or steps.fp_start or 0.0)

    def _on_step(self, marks: Marks, runs: list[SegmentRun]) -> bool:
        block = self._block
        if block is not None:
            block.absorb(marks, runs)
        elif marks.fp_start is not None:
            self._put(marks, runs)
        return block is not None or marks.fp_start is not None

    def _enter(self, block: Iteration) -> None:
        if self._block is not None:
            raise RuntimeError("trace.iteration() inside a block that is an iteration already")
        self._block = block

    def _leave(self, marks: Marks | None, runs: list[SegmentRun]) -> None:
        self._block = None
        if marks is not None:
            self._put(marks, runs)

    def _put(self, marks: Marks, runs: list[SegmentRun]) -> None:
        self._ended.append((marks, runs))
        if not self._wake.is_set():
            self._wake.set()

    # -- rows

    def _write(self) -> None:
        while True:
            self._wake.wait()
            if self._stopping.wait(FLUSH_SECONDS):  # others gather meanwhile
                return
            self._wake.clear()
            with self._lock:
                self._make_rows()

    def _make_rows(self) -> None:
        """Of all that has ended; into the file, too."""
        made = [self._row(*self._ended.popleft()) for _ in range(len(self._ended))]
        self._rows.extend(made)
        if self._file is None or not made:
            return
        try:
            self._file.append(made)
        except OSError as error:  # the disk is full, or worse: training goes on
            log.warning("the iteration trace %s ends here: %s", self._file.path, error.strerror)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _row(self, marks: Marks, runs: list[SegmentRun]) -> IterationRow:
        segments = [SegmentTimes(run.start, run.end, run.bytes) for run in runs]
        number, before = self._count, self._last_end
        self._count, self._last_end = number + 1, marks.iteration_end
        runtime = self._runtime
        shift = runtime.engine.clock_offset_seconds
        return make_row(number, runtime.rank, marks, segments, before, shift)


def trace_iterations(path: str | None = None) -> IterationTrace:
    """Trace all iterations of this rank from now on, until the trace is stopped.

    `path` is a file that every rank writes, ``.csv`` or ``.parquet``; ``.rank<N>`` is put before
    the suffix. CSV grows while training goes on, Parquet is written by ``stop()``. The iterations
    of a `DistributedOptimizer` of PyTorch, and those of a distributed Keras model, are seen by
    themselves; other loops have ``with trace.iteration():``. Several traces can be on.

    Raises `ValueError` for another suffix and before `init`, `OSError` when the file cannot be
    written, and `ImportError` for Parquet without pyarrow.
    """
    return IterationTrace(current(), path)


def announce(trainer: Any) -> None:
    """A `Trainer` has come: whoever traces follows it. The first begins what the settings ask for.

    It is remembered weakly. Raises as `trace_iterations`, for the file of the settings.
    """
    current().trainers.announce(trainer)
    trace_by_setting()


def trace_by_setting() -> IterationTrace | None:
    """The trace that the settings ask for, which begins with the first call; None without one.

    Raises as `trace_iterations`.
    """
    runtime = current()
    path, trainers = runtime.config.trace_iterations, runtime.trainers
    if path and trainers.by_setting is None:
        trainers.by_setting = IterationTrace(runtime, path)
    trace = trainers.by_setting
    assert trace is None or isinstance(trace, IterationTrace)
    return trace


__all__ = ["Iteration", "IterationTrace", "trace_iterations"]
