"""One iteration while it runs: the times that its trainer or block marks, and its reductions."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from hvdlite.common.iterations.rows import IterationTimes
from hvdlite.common.plain.entries import SegmentRun

now = time.monotonic


class StepMarks:
    """The marks of the step that one trainer is in, and the reductions of its gradients."""

    def __init__(
        self,
        names: Callable[[], Collection[str]],
        end: Callable[[IterationTimes, list[SegmentRun]], bool],
    ) -> None:
        """Mark steps of the trainer whose gradients have these `names`.

        `end` receives the times and reductions of each finished step; it returns whether it accepts
        them.
        """
        self._names = names
        self._end = end
        # A copy of `names`, made again when their number changes: building it each time is slow.
        self._cached_names: frozenset[str] = frozenset()
        self._clear()

    def _clear(self) -> None:
        self.fp_start: float | None = None
        self.fp_end: float | None = None
        self.bp_end: float | None = None
        self.optimizer_time: float | None = None
        self.runs: list[SegmentRun] = []
        self.samples = 0
        self._optimizer_start = 0.0

    def forward_started(self, samples: int = 0) -> None:
        """Mark the beginning of forward with so many samples; the first mark in a step counts."""
        self.samples += samples
        if self.fp_start is None:
            self.fp_start = now()

    def forward_ended(self) -> None:
        """Mark that the model has its output; the last mark in a step counts."""
        self.fp_end = now()

    def backward_ended(self) -> None:
        """Mark the end of a backward pass; the last mark in a step counts."""
        self.bp_end = now()

    def optimizer_started(self) -> None:
        self._optimizer_start = now()

    def optimizer_ended(self) -> None:
        """Mark the end of the optimizer's own step, without the work of a closure inside it."""
        starts = [self._optimizer_start, self.bp_end or 0.0, *(run.end for run in self.runs)]
        self.optimizer_time = max(now() - max(starts), 0.0)

    def ended(self) -> bool:
        """Mark the end of the step; return whether it makes a row, which needs its beginning."""
        times = IterationTimes(
            self.fp_start, self.fp_end, self.bp_end, self.optimizer_time, now(), self.samples
        )
        accepted = self._end(times, self.runs)
        self._clear()
        return accepted

    def start_over(self) -> None:
        """Discard the marks, if a backward pass has ended: its gradients were thrown away."""
        if self.bp_end is not None:
            self._clear()

    def owns(self, run: SegmentRun) -> bool:
        """Return whether a reduction is of gradients of this trainer."""
        names = self._names()
        if len(names) != len(self._cached_names):
            self._cached_names = frozenset(names)
        return run.gradient_of(self._cached_names) is not None


class IterationMarks:
    """The marks of a block that is one iteration: it begins with forward and ends with the step.

    Marks that the user leaves out come from the hooks of a distributed optimizer, where there is
    one. Without either, backward ends when the last gradient is submitted.
    """

    def __init__(
        self,
        begin: Callable[[IterationMarks], None],
        end: Callable[[IterationTimes | None, list[SegmentRun]], None],
    ) -> None:
        """Call `begin` on entry and `end` on exit, with None for the times if the block raised."""
        self._begin = begin
        self._end = end
        self._start = 0.0
        self._forward_end: float | None = None
        self._backward_end: float | None = None
        self._reduced: float | None = None
        self._hooked: list[IterationTimes] = []  # of the steps of optimizers inside the block
        self.runs: list[SegmentRun] = []

    def forward_done(self) -> None:
        """Mark that the model has its output; the last call counts."""
        self._forward_end = now()

    def backward_done(self) -> None:
        """Mark that this rank has all its gradients; the last call counts."""
        self._backward_end = now()

    def reduced(self) -> None:
        """Mark that all gradients are reduced, and only the optimizer's own step is left."""
        self._reduced = now()

    def absorb(self, times: IterationTimes, runs: list[SegmentRun]) -> None:
        """Record the step of an optimizer with hooks inside the block."""
        self._hooked.append(times)
        self.runs += runs

    def discard(self) -> None:
        """End the block without a row."""
        self._end(None, self.runs)

    def __enter__(self) -> IterationMarks:
        self._begin(self)
        self._start = now()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        end = now()
        if kind is not None:
            self.discard()
        else:
            self._end(self._times(end), self.runs)

    def _times(self, end: float) -> IterationTimes:
        hooked = self._hooked
        in_optimizers = [
            times.optimizer_time for times in hooked if times.optimizer_time is not None
        ]
        last_ready = _latest(run.ready for run in self.runs)
        return IterationTimes(
            self._start,
            self._forward_end or _latest(times.fp_end for times in hooked),
            self._backward_end or _latest(times.bp_end for times in hooked) or last_ready,
            end - self._reduced if self._reduced else sum(in_optimizers) if in_optimizers else None,
            end,
            sum(times.samples for times in hooked),
        )


def _latest(times: Iterable[float | None]) -> float | None:
    """Return the last time; None and 0 stand for times that were not marked."""
    return max((seconds for seconds in times if seconds), default=None)
