"""The execution of `auto`: measure iterations, and change all ranks' segments at the same step.

A gradient is ready when the last rank has it, so ranks exchange their times, on the clock of rank
0. The first rank of the process set runs the tuner and broadcasts its decision after a step, so
that the next step is the same on every rank.

[Note: who decides while a rank has joined]
Nobody. A joined rank makes no calls: its engine contributes neutral data to the collectives of the
others, and its training loop receives no broadcast. So a decision that all ranks must follow, such
as other segments, would be missed by it, and it would submit other tensors than the rest when its
join is complete. If the joined rank is the one that decides, the others would even receive zeros as
its decision, or the error that the root has joined. Therefore ranks first count themselves with an
allreduce of ones (`no_rank_has_joined`). A joined rank adds 0, all others see the same sum, and all
of them skip the decision. After the join the ranks agree again by [Note: eras and join] in
runtime.py.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from hvdlite.common.api.objects import array_forms
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.segmentation.saved_results import load, save
from hvdlite.common.segmentation.strategies import MOST_SEGMENTS, Gradient
from hvdlite.common.settings.setting import check_output_file

log = logging.getLogger("hvdlite")

if TYPE_CHECKING:
    from hvdlite.common.segmentation.tuner import Decision, Tuner

MOST_RUNS = 1024  # the most reductions of one iteration that are kept
STEPS_WHEN_FROZEN = 10  # between two checks for drift
_NO_CHANGE, _TRIAL, _FROZEN = range(3)  # the kinds of decisions in the broadcast


def no_rank_has_joined(label: str, process_set: ProcessSet) -> bool:
    """Return whether no rank has joined; all other ranks call this at the same point."""
    one = np.ones(1, np.int64)
    name = f"segmentation.ranks.{label}"
    ranks = array_forms.allreduce(one, name=name, op=ReduceOp.SUM, process_set=process_set)
    return int(ranks[0]) == process_set.size()


def _checked(file: str) -> str:
    """Return the file that keeps what is learned; "" with a warning where it cannot be written."""
    try:
        check_output_file(file)
    except ValueError as error:
        log.warning("what segmentation auto:%s learns will not be kept: the file %s", file, error)
        return ""
    return file


class AutoSegments:
    """The segmentation of the gradients of one optimizer while it is tuned."""

    def __init__(
        self, gradients: Sequence[Gradient], label: str, process_set: ProcessSet, file: str = ""
    ) -> None:
        """Tune `gradients`, which are in ready order; `label` is the same on all ranks.

        The first rank reads and writes `file`.
        """
        runtime = for_collective()
        self._engine = runtime.engine
        self.gradients = tuple(gradients)
        self._label, self._process_set, self._file = label, process_set, file
        self._root = min(process_set.ranks or [0])
        # Set by the same decision on all ranks: tuning has ended, and times are shared rarely.
        self.frozen = False
        self._steps = 0
        self._ready: dict[str, float] = {}
        self._runs: deque[SegmentRun] = deque(maxlen=MOST_RUNS)
        # Set on the first rank alone; the others follow its decisions.
        self._tuner: Tuner | None = None
        # The last indices from the file, until the user has been told of them.
        self._saved: list[int] | None = None
        if runtime.rank == self._root:
            self._file = file = _checked(file)
            self._saved = load(file, gradients) if file else None
            from hvdlite.common.segmentation.tuner import Tuner  # Most jobs never need it.

            self._tuner = Tuner(gradients, self._saved)
            names, runs = {gradient.name for gradient in gradients}, self._runs

            def keep(run: SegmentRun) -> None:
                if run.gradient_of(names) is not None:
                    runs.append(run)

            # `keep` must not refer to self: the engine would keep this object alive.
            weakref.finalize(self, runtime.engine.observe(keep))

    def note(self, name: str) -> None:
        """Record that this gradient is complete on this rank."""
        self._ready[name] = time.monotonic()

    def note_missing(self) -> None:
        """Record the remaining gradients as complete: backward skipped them, and zeros are sent."""
        for gradient in self.gradients:
            if gradient.name not in self._ready:
                self.note(gradient.name)

    def restart_count(self) -> None:
        """Count steps from 0 again; ranks call this at the same point after unequal step counts."""
        self._steps = 0

    def step(self) -> list[int] | None:
        """Return the last indices that apply from now on; None: the segments stay as they are.

        Every rank of the process set calls this after each step, when all gradients are reduced.
        """
        runs, ready = [*self._runs], self._ready
        self._runs.clear()
        self._ready = {}
        self._steps += 1
        if self.frozen and self._steps % STEPS_WHEN_FROZEN:
            return None
        times = self._latest_times(ready)
        if not no_rank_has_joined(self._label, self._process_set):
            return None
        message = np.zeros(1 + MOST_SEGMENTS, np.int64)  # the kind, the last indices, and -1
        if self._tuner is not None:
            self._observe(self._tuner, times, runs)
            decision = self._tuner.decide()
            if decision is not None:
                message[0] = _FROZEN if decision.frozen else _TRIAL
                message[1:] = -1
                message[1 : 1 + len(decision.last_indices)] = decision.last_indices
                if decision.frozen:
                    self._announce(self._tuner, decision)
        name = f"segmentation.auto.{self._label}"
        kind, *last_indices = array_forms.broadcast(
            message, self._root, name, self._process_set
        ).tolist()
        if kind == _NO_CHANGE:
            return None
        self.frozen = kind == _FROZEN
        return [index for index in last_indices if index >= 0]

    def _latest_times(self, ready: dict[str, float]) -> list[float]:
        """Return when the last rank had each gradient, and when it had all results, in seconds."""
        times = [ready[gradient.name] for gradient in self.gradients]
        local = np.array([*times, time.monotonic()]) + self._engine.clock_offset_seconds
        name = f"segmentation.times.{self._label}"
        latest = array_forms.allreduce(
            local, name=name, op=ReduceOp.MAX, process_set=self._process_set
        )
        seconds: list[float] = latest.tolist()
        return seconds

    def _observe(self, tuner: Tuner, times: list[float], runs: list[SegmentRun]) -> None:
        from hvdlite.common.segmentation.cost import MeasuredIteration

        *ready, end = times
        start = min(ready)
        ahead = self._engine.clock_offset_seconds - start
        spans = [(run.bytes, run.start + ahead, run.end + ahead) for run in runs]
        tuner.observe(
            MeasuredIteration(
                tuple(seconds - start for seconds in ready),
                # A reduction before the first gradient belongs to another optimizer.
                tuple(span for span in spans if span[1] >= 0),
                max(ready) - start,
                end - start,
            )
        )

    def _announce(self, tuner: Tuner, decision: Decision) -> None:
        """Print a frozen segmentation, and save it unless it comes from the file."""
        segments = len(decision.last_indices)
        count = f"{segments} segment{'s' if segments > 1 else ''}"
        subject = f"hvdlite: {len(self.gradients)} gradients are"
        saved, self._saved = self._saved, None
        if saved is not None:
            print(f"{subject} reduced in {count}, as {self._file} says: {tuner.call}", flush=True)
            return
        print(f"{subject} best reduced in {count}: {tuner.call}", flush=True)
        if self._file:
            save(self._file, decision.last_indices, self.gradients)
