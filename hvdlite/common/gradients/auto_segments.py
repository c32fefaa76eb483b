"""`auto` at work: what an iteration took is measured, and all ranks cut anew at the same step.

A gradient is ready when the last rank has it: ranks tell each other their times, on the clock of
rank 0. The first rank of the process set decides, and tells the others after a step, so that the
next one is the same everywhere. While a rank has joined, nothing is decided: it would not hear.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Sequence

import numpy as np

from hvdlite.common.api.forms import Forms
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.entries import SegmentRun
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.state import for_collective
from hvdlite.common.segmentation.cost import Iteration
from hvdlite.common.segmentation.saved_results import load, save
from hvdlite.common.segmentation.strategies import MOST_SEGMENTS, Gradient
from hvdlite.common.segmentation.tuner import Decision, Tuner

MOST_RUNS = 1024  # that are kept of one iteration
STEPS_WHEN_FROZEN = 10  # from one look whether something has changed to the next
_NOTHING, _TRY, _KEEP = range(3)  # what the first rank says

_forms: Forms[Array] = Forms(NumpyAdapter())


def all_here(label: str, process_set: ProcessSet) -> bool:
    """Whether no rank has joined. All others ask at the same point."""
    one = np.ones(1, np.int64)
    name = f"segmentation.ranks.{label}"
    ranks = _forms.allreduce(one, name=name, op=ReduceOp.SUM, process_set=process_set)
    return int(ranks[0]) == process_set.size()


class AutoSegments:
    """The segmentation of the gradients of one optimizer, as it is found."""

    def __init__(
        self, gradients: Sequence[Gradient], label: str, process_set: ProcessSet, file: str = ""
    ) -> None:
        """`gradients` in the order in which they become ready; `label` is the same on all ranks.

        `file` is read and written by the first rank.
        """
        runtime = for_collective()
        self._engine = runtime.engine
        self.gradients = tuple(gradients)
        self._label = label
        self._process_set = process_set
        self._file = file
        self._root = min(process_set.ranks or [0])
        self.frozen = False  # nothing is tried any more; the same on all ranks
        self._steps = 0
        self._ready: dict[str, float] = {}
        self._runs: deque[SegmentRun] = deque(maxlen=MOST_RUNS)
        self._tuner: Tuner | None = None
        self._known: list[int] | None = None  # by the file
        if runtime.rank == self._root:
            self._known = load(file, gradients) if file else None
            self._tuner = Tuner(gradients, self._known)
            names, runs = {each.name for each in gradients}, self._runs

            def keep(run: SegmentRun) -> None:
                if run.gradient_of(names) is not None:
                    runs.append(run)

            weakref.finalize(self, runtime.engine.observe(keep))

    def note(self, name: str) -> None:
        """This gradient is complete."""
        self._ready[name] = time.monotonic()

    def note_missing(self) -> None:
        """Those that are not complete by now do not come: zeros take their place from now on."""
        for each in self.gradients:
            if each.name not in self._ready:
                self.note(each.name)

    def restart_count(self) -> None:
        """All ranks are at the same point, after different numbers of steps."""
        self._steps = 0

    def step(self) -> list[int] | None:
        """All gradients are reduced. Where segments end from now on; None: as before.

        Every rank of the set calls it after each step.
        """
        runs, ready = [*self._runs], self._ready
        self._runs.clear()
        self._ready = {}
        self._steps += 1
        if self.frozen and self._steps % STEPS_WHEN_FROZEN:
            return None
        times = self._share(ready)
        if not all_here(self._label, self._process_set):
            return None
        said = np.zeros(1 + MOST_SEGMENTS, np.int64)
        if self._tuner is not None:
            self._observe(self._tuner, times, runs)
            self._say(self._tuner, said)
        name = f"segmentation.auto.{self._label}"
        kind, *ends = _forms.broadcast(said, self._root, name, self._process_set).tolist()
        if kind == _NOTHING:
            return None
        self.frozen = kind == _KEEP
        return [end for end in ends if end >= 0]

    def _share(self, ready: dict[str, float]) -> list[float]:
        """When the last rank had each gradient, and when the last of them had all reduced."""
        times = [ready[each.name] for each in self.gradients]
        local = np.array([*times, time.monotonic()]) + self._engine.clock_offset_seconds
        name = f"segmentation.times.{self._label}"
        latest = _forms.allreduce(local, name=name, op=ReduceOp.MAX, process_set=self._process_set)
        seconds: list[float] = latest.tolist()
        return seconds

    def _observe(self, tuner: Tuner, times: list[float], runs: list[SegmentRun]) -> None:
        *ready, end = times
        start = min(ready)
        ahead = self._engine.clock_offset_seconds - start
        spans = [(run.bytes, run.start + ahead, run.end + ahead) for run in runs]
        tuner.observe(
            Iteration(
                tuple(each - start for each in ready),
                tuple(span for span in spans if span[1] >= 0),  # others: of another optimizer
                max(ready) - start,
                end - start,
            )
        )

    def _say(self, tuner: Tuner, said: Array) -> None:
        decision = tuner.decide()
        if decision is None:
            return
        said[0] = _KEEP if decision.frozen else _TRY
        said[1:] = -1
        said[1 : 1 + len(decision.ends)] = decision.ends
        if decision.frozen:
            self._tell(tuner, decision)

    def _tell(self, tuner: Tuner, decision: Decision) -> None:
        """In words, once for each choice; and to the file."""
        count = f"{len(decision.ends)} segment{'s' if len(decision.ends) > 1 else ''}"
        who = f"hvdlite: {len(self.gradients)} gradients travel"
        known, self._known = self._known, None
        if known is not None:
            print(f"{who} in {count}, as {self._file} says: {tuner.text}", flush=True)
            return
        print(f"{who} best in {count}: {tuner.text}", flush=True)
        if self._file:
            save(self._file, decision.ends, self.gradients)
