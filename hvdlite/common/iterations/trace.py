"""The iteration trace: one row for every iteration of this rank, on a clock that all ranks share.

    training thread      StepMarks (an optimizer), IterationMarks (a block) -> times -> queue
    engine thread        finished reductions -> the same queue
    writer thread        queue -> iterations with their reductions -> rows -> file

An iteration costs a few clock readings and one append: the writer makes the rows and writes them.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple, Protocol
from weakref import WeakMethod, finalize

from hvdlite.common.api.objects import allgather_object
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.iterations.marks import EndedStep, IterationMarks, StepMarks
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
MOST_UNSETTLED = 256  # collectives and steps that gather before a thread that trains must settle
MOST_UNASSIGNED = 2048  # reductions of gradients that wait for the end of their iteration
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
    """Follows all trainers of this rank, and hands over each finished iteration by `_put`.

    Reductions and ends of iterations gather in the order in which they occur, which costs the
    threads that train one append each. Later, many at a time, `settle` finds what belongs together:
    an iteration has the reductions before its end that are of its gradients.
    """

    _coarse = False  # See `StepMarks`.

    def __init__(self, runtime: Runtime) -> None:
        """Follow nothing before `_begin`."""
        self._runtime = runtime
        self._settling = threading.RLock()  # Guards what `settle` changes.
        self._seen: deque[SegmentRun | EndedStep | Occurrence] = deque()
        self._following: list[StepMarks] = []
        # Reductions whose iteration has not ended.
        self._unassigned: deque[SegmentRun] = deque(maxlen=MOST_UNASSIGNED)
        # The steps of optimizers with hooks, and their reductions, in a block that `settle` is in.
        self._in_block: tuple[list[IterationTimes], list[SegmentRun]] | None = None
        # Called by `_end`: they remove this from trainers.
        self._detach: list[Callable[[], object]] = []
        # Set while the training thread is inside a block that is one iteration.
        self._block: IterationMarks | None = None
        # Called by the training thread when an iteration has ended.
        self._on_end: Callable[[], None] | None = None
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
        """Take a finished iteration, whose beginning is known; called by `settle`."""
        raise NotImplementedError

    def _put_run(self, run: SegmentRun, of_iteration: bool) -> None:
        """Take a collective, which may belong to an iteration or not; called by `settle`."""

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
        steps = StepMarks(
            lambda: ask() if (ask := names()) else None, self._on_step, coarse=self._coarse
        )
        self._following.append(steps)
        # It is forgotten by `settle`, when its last steps have their reductions.
        gone = finalize(trainer, self._seen.append, Occurrence(self._following.remove, steps))
        self._detach += [gone.detach, trainer.trace_steps(steps)]

    def _on_run(self, run: SegmentRun) -> None:
        """Take a collective that has run.

        The engine's thread calls this before it completes the handles, so that a reduction is here
        before its iteration can end.
        """
        self._seen.append(run)
        if len(self._seen) >= MOST_UNSETTLED:
            self._settle_if_free()

    def _on_step(self, ended: EndedStep) -> bool:
        self._seen.append(ended)
        if len(self._seen) >= MOST_UNSETTLED:
            self._settle_if_free()
        accepted = ended.times.fp_start is not None
        if accepted and self._on_end is not None:
            self._on_end()
        return accepted or self._block is not None

    def _enter(self, block: IterationMarks) -> None:
        if self._block is not None:
            raise RuntimeError("trace.iteration() inside a block that is an iteration already")
        self._block = block
        self._seen.append(Occurrence(self._block_began, block))

    def _exit(self, block: IterationMarks) -> None:
        self._seen.append(Occurrence(self._block_ended, block))
        self._block = None
        if block.end is not None and self._on_end is not None:
            self._on_end()

    # -- later

    def _settle_if_free(self) -> None:
        if self._settling.acquire(blocking=False):
            try:
                self.settle()
            finally:
                self._settling.release()

    def settle(self) -> None:
        """Hand over all that has ended until now."""
        with self._settling:
            seen = self._seen
            while seen:
                each = seen.popleft()
                if isinstance(each, SegmentRun):
                    found = self._may_be_of_iteration(each)
                    if found:
                        self._unassigned.append(each)
                    self._put_run(each, found)
                elif isinstance(each, EndedStep):
                    self._step_ended(each)
                else:
                    each.settle(each.argument)

    def _may_be_of_iteration(self, run: SegmentRun) -> bool:
        for steps in self._following:
            if steps.owns(run):
                return True
        if self._in_block is None or self._following or not SPECS[run.collective].reduces:
            return False
        return not all(name.startswith(NO_GRADIENT) for name in run.names)

    def _take(self, since: float, steps: StepMarks | None = None) -> list[SegmentRun]:
        """Return the reductions that ended since then, of a trainer or all; forget older ones.

        Older ones are of gradients that were thrown away.
        """
        runs = [run for run in self._unassigned if steps is None or steps.owns(run)]
        if len(runs) == len(self._unassigned):
            self._unassigned.clear()
        else:
            for run in runs:
                self._unassigned.remove(run)
        return [run for run in runs if run.end > since]

    def _step_ended(self, ended: EndedStep) -> None:
        times = ended.times
        in_block = self._in_block
        start = times.fp_start
        runs = self._take(0.0 if in_block is not None else start or 0.0, ended.steps)
        if in_block is not None:
            in_block[0].append(ended.finished(runs))
            in_block[1].extend(runs)
        elif start is not None:
            self._put(ended.finished(runs), runs)

    def _block_began(self, block: IterationMarks) -> None:
        self._in_block = [], []

    def _block_ended(self, block: IterationMarks) -> None:
        assert self._in_block is not None
        (hooked, runs), self._in_block = self._in_block, None
        if not self._following:
            runs += self._take(0.0)
        if block.end is not None:
            self._put(block.finished(runs, hooked), [run for run in runs if run.end > block.start])


class Occurrence(NamedTuple):
    """What `Following.settle` calls with its argument, when it comes to it."""

    settle: Callable[[Any], None]
    argument: Any


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
        self._made.append(self._row(times, runs))

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

    def _row(self, times: IterationTimes, runs: list[SegmentRun]) -> IterationRow:
        segments = [SegmentTimes(run.start, run.end, run.bytes) for run in runs]
        iteration, previous_end = self._count, self._last_end
        self._count, self._last_end = iteration + 1, times.iteration_end
        runtime = self._runtime
        shift = runtime.engine.clock_offset_seconds
        return make_row(iteration, runtime.rank, times, segments, previous_end, shift)


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
