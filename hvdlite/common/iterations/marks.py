"""One iteration while it goes on: what its trainer or its block tells of it, and its gradients."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

from hvdlite.common.iterations.rows import Marks
from hvdlite.common.plain.entries import SegmentRun

now = time.monotonic


class Steps:
    """The marks of the iteration that one trainer is in, and its gradients that have travelled."""

    def __init__(
        self,
        names: Callable[[], Collection[str]],
        end: Callable[[Marks, list[SegmentRun]], bool],
    ) -> None:
        """`names` are those of the gradients; `end` is told of an iteration, and may refuse it."""
        self._names = names
        self._end = end
        self._known_names: frozenset[str] = frozenset()
        self._clear()

    def _clear(self) -> None:
        self.fp_start: float | None = None
        self.fp_end: float | None = None
        self.bp_end: float | None = None
        self.optimizer_time: float | None = None
        self.runs: list[SegmentRun] = []
        self._optimizer_start = 0.0

    def forward_started(self) -> None:
        """Forward begins; the first time in an iteration counts."""
        if self.fp_start is None:
            self.fp_start = now()

    def forward_ended(self) -> None:
        """A model has its output; the last time in an iteration counts."""
        self.fp_end = now()

    def backward_ended(self) -> None:
        """A backward pass has ended; the last one counts."""
        self.bp_end = now()

    def optimizer_started(self) -> None:
        """The optimizer begins its own step."""
        self._optimizer_start = now()

    def optimizer_ended(self) -> None:
        """The optimizer's own step has ended. What a closure did inside it is not part of it."""
        starts = [self._optimizer_start, self.bp_end or 0.0, *(run.end for run in self.runs)]
        self.optimizer_time = max(now() - max(starts), 0.0)

    def ended(self) -> bool:
        """The iteration has ended. Whether it makes a row; not without its beginning."""
        marks = Marks(self.fp_start, self.fp_end, self.bp_end, self.optimizer_time, now())
        taken = self._end(marks, self.runs)
        self._clear()
        return taken

    def start_over(self) -> None:
        """Gradients were thrown away, and with them what led to them; if anything has."""
        if self.bp_end is not None:
            self._clear()

    def takes(self, run: SegmentRun) -> bool:
        """Whether these are gradients of this trainer."""
        names = self._names()
        if len(names) != len(self._known_names):
            self._known_names = frozenset(names)
        return run.gradient_of(self._known_names) is not None


class Iteration:
    """A block that is one iteration: forward begins where it begins, the step ends where it ends.

    What is not told is taken from the hooks of a distributed optimizer, where there is one. The end
    of backward, otherwise, is when the last gradient was handed over.
    """

    def __init__(
        self,
        begin: Callable[[Iteration], None],
        end: Callable[[Marks | None, list[SegmentRun]], None],
    ) -> None:
        """`end` is told of None when the block has raised."""
        self._begin = begin
        self._end = end
        self._start = 0.0
        self._forward_end: float | None = None
        self._backward_end: float | None = None
        self._reduced: float | None = None
        self._hooked: list[Marks] = []  # of steps that optimizers have made in the block
        self.runs: list[SegmentRun] = []

    def forward_done(self) -> None:
        """The model has its output; the last call counts."""
        self._forward_end = now()

    def backward_done(self) -> None:
        """This rank has all its gradients; the last call counts."""
        self._backward_end = now()

    def reduced(self) -> None:
        """The gradients of all ranks are here, and only the optimizer's own step is left."""
        self._reduced = now()

    def absorb(self, marks: Marks, runs: list[SegmentRun]) -> None:
        """An optimizer with hooks has made a step inside the block."""
        self._hooked.append(marks)
        self.runs += runs

    def discard(self) -> None:
        """End the block without a row."""
        self._end(None, self.runs)

    def __enter__(self) -> Iteration:
        self._begin(self)
        self._start = now()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        end = now()
        if kind is not None:
            self.discard()
        else:
            self._end(self._marks(end), self.runs)

    def _marks(self, end: float) -> Marks:
        hooked = self._hooked
        own = [each.optimizer_time for each in hooked if each.optimizer_time is not None]
        last_ready = _latest(run.ready for run in self.runs)
        return Marks(
            self._start,
            self._forward_end or _latest(each.fp_end for each in hooked),
            self._backward_end or _latest(each.bp_end for each in hooked) or last_ready,
            end - self._reduced if self._reduced else sum(own) if own else None,
            end,
        )


def _latest(times: Iterable[float | None]) -> float | None:
    """The last of the times that are known; 0 is not."""
    return max((each for each in times if each), default=None)
