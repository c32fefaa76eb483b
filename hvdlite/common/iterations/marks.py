"""One iteration while it runs: the times that its trainer or block marks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from hvdlite.common.iterations.rows import IterationTimes
from hvdlite.common.requests.entries import SegmentRun

now = time.monotonic


class EndedStep(NamedTuple):
    """A step that has ended; which reductions belong to it is found later."""

    steps: StepMarks
    times: IterationTimes  # Without the optimizer's own time.
    optimizer: tuple[float, float] | None  # When its own step began and ended.

    def finished(self, runs: Sequence[SegmentRun]) -> IterationTimes:
        """Return the times, with the optimizer's own, without the work of a closure inside it."""
        if self.optimizer is None:
            return self.times
        start, end = self.optimizer
        starts = [start, self.times.bp_end or 0.0, *(run.end for run in runs if run.end <= end)]
        return self.times._replace(optimizer_time=max(end - max(starts), 0.0))


class StepMarks:
    """The marks of the step that one trainer is in."""

    def __init__(
        self,
        names: Callable[[], Collection[str] | None],
        end: Callable[[EndedStep], bool],
        *,
        coarse: bool = False,
    ) -> None:
        """Mark steps of the trainer whose gradients have these `names`; None: it is gone.

        `end` receives each finished step; it returns whether it accepts it. With `coarse` a trainer
        may leave out `forward_ended` and `optimizer_started`, and mark the end of backward where it
        begins to wait for other ranks: this costs less.
        """
        self.coarse = coarse
        self._names = names
        self._end = end
        # A copy of `names`, made again when their number changes: building it each time is slow.
        self._cached_names = frozenset(names() or ())
        self._clear()

    def _clear(self) -> None:
        self.fp_start: float | None = None
        self.fp_end: float | None = None
        self.bp_end: float | None = None
        self.samples = 0
        self._optimizer_start = 0.0
        self._optimizer_end: float | None = None

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
        """Mark the end of the optimizer's own step."""
        self._optimizer_end = now()

    def ended(self) -> bool:
        """Mark the end of the step; return whether it makes a row, which needs its beginning."""
        times = IterationTimes(self.fp_start, self.fp_end, self.bp_end, None, now(), self.samples)
        end = self._optimizer_end
        span = None if end is None else (self._optimizer_start, end)
        self._clear()
        return self._end(EndedStep(self, times, span))

    def start_over(self) -> None:
        """Discard the marks, if a backward pass has ended: its gradients were thrown away."""
        if self.bp_end is not None:
            self._clear()

    def owns(self, run: SegmentRun) -> bool:
        """Return whether a reduction is of gradients of this trainer."""
        names = self._names()
        if names is not None and len(names) != len(self._cached_names):
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
        end: Callable[[IterationMarks], None],
    ) -> None:
        """Call `begin` on entry and `end` on exit."""
        self._begin = begin
        self._end = end
        self.start = 0.0
        self.end: float | None = None  # None: discarded, or not ended.
        self._forward_end: float | None = None
        self._backward_end: float | None = None
        self._reduced: float | None = None
        self._over = False

    def forward_done(self) -> None:
        """Mark that the model has its output; the last call counts."""
        self._forward_end = now()

    def backward_done(self) -> None:
        """Mark that this rank has all its gradients; the last call counts."""
        self._backward_end = now()

    def reduced(self) -> None:
        """Mark that all gradients are reduced, and only the optimizer's own step is left."""
        self._reduced = now()

    def discard(self) -> None:
        """End the block without a row."""
        if not self._over:
            self._over = True
            self._end(self)

    def __enter__(self) -> IterationMarks:
        self._begin(self)
        self.start = now()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None and not self._over:
            self.end = now()
        self.discard()

    def finished(
        self, runs: Sequence[SegmentRun], hooked: Sequence[IterationTimes]
    ) -> IterationTimes:
        """Return the times; `hooked` are those of steps of optimizers with hooks inside of it."""
        assert self.end is not None
        in_optimizers = [
            times.optimizer_time for times in hooked if times.optimizer_time is not None
        ]
        own = sum(in_optimizers) if in_optimizers else None
        return IterationTimes(
            self.start,
            self._forward_end or _latest(times.fp_end for times in hooked),
            self._backward_end
            or _latest(times.bp_end for times in hooked)
            or _latest(run.ready for run in runs),
            self.end - self._reduced if self._reduced else own,
            self.end,
            sum(times.samples for times in hooked),
        )


def _latest(times: Iterable[float | None]) -> float | None:
    """Return the last time; None and 0 stand for times that were not marked."""
    return max((seconds for seconds in times if seconds), default=None)
