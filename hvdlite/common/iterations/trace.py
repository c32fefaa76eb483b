"""The iteration trace: one row for every iteration of this rank, on a clock that all ranks share.

    training thread      StepMarks (an optimizer), IterationMarks (a block) -> times -> queue
    engine thread        finished reductions -> the marks of the iteration that they belong to
    writer thread        queue -> rows -> file

An iteration costs a few clock readings and one append: the writer makes the rows and writes them.
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
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.iterations.marks import IterationMarks, StepMarks
from hvdlite.common.iterations.rows import (
    IterationRow,
    IterationTimes,
    RowsFile,
    SegmentTimes,
    check_path,
    make_row,
    open_rows,
)
from hvdlite.common.plain.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.runtime import Runtime

FLUSH_SECONDS = 0.2  # how long iterations gather before they are written
MOST_ROWS = 50_000  # the rows that `IterationTrace.rows` remembers: some 50 MB
# The prefix of reductions by which ranks agree on the parameters that some rank trains.
NO_GRADIENT = "allreduce.trainable_parameters."

log = logging.getLogger("hvdlite")


class Trainer(Protocol):
    """A source of iterations that marks them itself, such as a distributed optimizer."""

    def trace_steps(self, steps: StepMarks) -> Callable[[], None]:
        """Mark every iteration in `steps`, until the returned function is called."""

    def gradient_names(self) -> Collection[str]:
        """Return the names under which its gradients are reduced; asked after each step."""

    def call_after_step(self, function: Callable[[], None]) -> None:
        """Call `function` once, in the training thread, when the next step has ended."""


class Following:
    """Follows all trainers of this rank, and hands over each finished iteration by `_put`."""

    def __init__(self, runtime: Runtime) -> None:
        """Follow nothing before `_begin`."""
        self._runtime = runtime
        self._following: list[StepMarks] = []
        # Called by `_end`: they remove this from trainers.
        self._detach: list[Callable[[], object]] = []
        # Set while the training thread is inside a block that is one iteration.
        self._block: IterationMarks | None = None
        # Ends the observation of the engine of this world.
        self._stop_observing: Callable[[], None] = lambda: None

    def _begin(self, *, between_steps: bool = False) -> None:
        """Follow all trainers, or each from the end of its next step on if `between_steps`.

        Another thread than that which trains must not change the hooks within a step.
        """
        self._stop_observing = self._runtime.engine.observe(self._on_run)
        self._runtime.trainers.add(self, between_steps=between_steps)

    def _end(self) -> None:
        self._runtime.trainers.remove(self)
        self._stop_observing()
        for detach in self._detach:
            detach()

    def stop(self) -> None:
        """End all; idempotent. Raises `OSError` where a file cannot be completed."""
        raise NotImplementedError

    def _put(self, times: IterationTimes, runs: list[SegmentRun]) -> None:
        """Take a finished iteration, whose beginning is known; called by the training thread."""
        raise NotImplementedError

    def iteration(self) -> IterationMarks:
        """Return a context manager for one iteration of a loop that hooks cannot see.

        In ``with trace.iteration() as it:`` call ``it.forward_done()``, ``it.backward_done()`` and
        ``it.reduced()`` at these points; each may be left out. All reductions that end in the block
        belong to it; with a distributed optimizer of PyTorch only those of its gradients. A block
        that raises makes no row. Raises `RuntimeError` inside another such block.
        """
        return IterationMarks(self._enter, self._exit)

    # -- for trainers and the engine

    def enter(self, runtime: Runtime) -> None:
        """Go on in another world of an elastic job, whose ranks are others. Raises `OSError`."""
        self._runtime = runtime
        self._stop_observing = runtime.engine.observe(self._on_run)

    def follow(self, trainer: Trainer) -> None:
        """Trace the iterations of `trainer` from now on, without keeping it alive."""
        names = WeakMethod(trainer.gradient_names)
        steps = StepMarks(lambda: ask() if (ask := names()) else (), self._on_step)
        self._following.append(steps)
        gone = finalize(trainer, self._following.remove, steps)
        self._detach += [gone.detach, trainer.trace_steps(steps)]

    def _on_run(self, run: SegmentRun) -> None:
        """See `_assign`."""
        self._assign(run)

    def _assign(self, run: SegmentRun) -> bool:
        """Assign a reduction to its iteration; return whether it belongs to one.

        The engine's thread calls this before it completes the handles, so that the reduction is
        recorded before its iteration can end.
        """
        owners = [steps for steps in self._following if steps.owns(run)]
        if owners:
            _owner_in_iteration(owners).runs.append(run)
            return True
        block = self._block
        if block is None or self._following or not SPECS[run.collective].reduces:
            return False
        if all(name.startswith(NO_GRADIENT) for name in run.names):
            return False
        block.runs.append(run)
        return True

    def _on_step(self, times: IterationTimes, runs: list[SegmentRun]) -> bool:
        block = self._block
        if block is not None:
            block.absorb(times, runs)
        elif times.fp_start is not None:
            self._put(times, runs)
        return block is not None or times.fp_start is not None

    def _enter(self, block: IterationMarks) -> None:
        if self._block is not None:
            raise RuntimeError("trace.iteration() inside a block that is an iteration already")
        self._block = block

    def _exit(self, times: IterationTimes | None, runs: list[SegmentRun]) -> None:
        self._block = None
        if times is not None:
            self._put(times, runs)


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
        self._lock = threading.RLock()  # guards _rows, _count, _last_end and _file
        # Finished iterations of which the writer has made no row yet.
        self._ended: deque[tuple[IterationTimes, list[SegmentRun]]] = deque()
        self._rows: deque[IterationRow] = deque(maxlen=MOST_ROWS)
        self._count = 0
        self._last_end: float | None = None
        self._wake, self._stopping = threading.Event(), threading.Event()
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

    def _put(self, times: IterationTimes, runs: list[SegmentRun]) -> None:
        self._ended.append((times, runs))
        if not self._wake.is_set():
            self._wake.set()

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
        made = [self._row(*self._ended.popleft()) for _ in range(len(self._ended))]
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

    def _row(self, times: IterationTimes, runs: list[SegmentRun]) -> IterationRow:
        segments = [SegmentTimes(run.start, run.end, run.bytes) for run in runs]
        iteration, previous_end = self._count, self._last_end
        self._count, self._last_end = iteration + 1, times.iteration_end
        runtime = self._runtime
        shift = runtime.engine.clock_offset_seconds
        return make_row(iteration, runtime.rank, times, segments, previous_end, shift)


def _owner_in_iteration(owners: list[StepMarks]) -> StepMarks:
    """Return the trainer that is in an iteration: several may have gradients of one name."""
    if len(owners) == 1:
        return owners[0]
    return max(owners, key=lambda steps: steps.bp_end or steps.fp_start or 0.0)


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
    path, trainers = runtime.config.trace_iterations, runtime.trainers
    if path and trainers.by_setting is None:
        trainers.by_setting = IterationTrace(runtime, path)
    trace = trainers.by_setting
    assert trace is None or isinstance(trace, IterationTrace)
    return trace


__all__ = ["IterationMarks", "IterationTrace", "trace_iterations"]
