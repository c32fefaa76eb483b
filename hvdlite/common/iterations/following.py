"""What follows the iterations of all trainers of this rank: a trace, or counts.

training thread      StepMarks (an optimizer), IterationMarks (a block) -> queue
engine thread        finished reductions -> the same queue
later, any thread    queue -> iterations with their reductions
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Protocol
from weakref import WeakMethod, finalize

from hvdlite.common.collectives.table import SPECS
from hvdlite.common.iterations.marks import EndedStep, IterationMarks, StepMarks
from hvdlite.common.iterations.rows import IterationTimes
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.runtime import Runtime

MOST_UNSETTLED = 256  # collectives and steps that gather before a thread that trains must settle
MOST_UNASSIGNED = 20_000  # reductions of gradients that wait for the end of their iteration
# The prefix of reductions by which ranks agree on the parameters that some rank trains.
NO_GRADIENT = "allreduce.trainable_parameters."


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
        # A function is what else occurs: `settle` calls it when it comes to it.
        self._seen: deque[SegmentRun | EndedStep | Callable[[], None]] = deque()
        self._following: list[StepMarks] = []
        # Reductions whose iteration has not ended.
        self._unassigned: deque[SegmentRun] = deque(maxlen=MOST_UNASSIGNED)
        # The steps of optimizers with hooks, and their reductions, in a block that `settle` is in.
        self._in_block: tuple[list[IterationTimes], list[SegmentRun]] | None = None
        # Set by `_end`: nothing is taken any more, such as a block of a loop that goes on.
        self._ended = False
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
        self._ended = True
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
        if self._ended:  # Since a trainer was asked to let it follow after its next step.
            return
        names = WeakMethod(trainer.gradient_names)
        steps = StepMarks(
            lambda: ask() if (ask := names()) else None, self._on_step, coarse=self._coarse
        )
        self._following.append(steps)
        # It is forgotten by `settle`, when its last steps have their reductions.
        gone = finalize(trainer, self._seen.append, partial(self._following.remove, steps))
        self._detach += [gone.detach, trainer.trace_steps(steps)]

    def _on_run(self, run: SegmentRun) -> None:
        """Take a collective that has run.

        The engine's thread calls this before it completes the handles, so that a reduction is here
        before its iteration can end.
        """
        self._see(run)

    def _on_step(self, ended: EndedStep) -> bool:
        self._see(ended)
        accepted = ended.times.fp_start is not None
        if accepted:
            self._tell_end()
        return accepted or self._block is not None

    def _enter(self, block: IterationMarks) -> None:
        if self._block is not None:
            raise RuntimeError("trace.iteration() inside a block that is an iteration already")
        self._block = block
        self._see(self._block_began)

    def _exit(self, block: IterationMarks) -> None:
        self._see(partial(self._block_ended, block))
        self._block = None
        if block.end is not None:
            self._tell_end()

    def _tell_end(self) -> None:
        on_end = self._on_end  # Another thread may set it to None.
        if on_end is not None:
            on_end()

    # -- later

    def _see(self, each: SegmentRun | EndedStep | Callable[[], None]) -> None:
        if self._ended:
            return
        self._seen.append(each)
        if len(self._seen) >= MOST_UNSETTLED and self._settling.acquire(blocking=False):
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
                    each()

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
        runs, others = list[SegmentRun](), list[SegmentRun]()
        for run in self._unassigned:
            (runs if steps is None or steps.owns(run) else others).append(run)
        self._unassigned = deque(others, maxlen=MOST_UNASSIGNED)
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

    def _block_began(self) -> None:
        self._in_block = [], []

    def _block_ended(self, block: IterationMarks) -> None:
        assert self._in_block is not None
        (hooked, runs), self._in_block = self._in_block, None
        if not self._following:
            runs += self._take(0.0)
        if block.end is not None:
            self._put(block.finished(runs, hooked), [run for run in runs if run.end > block.start])
