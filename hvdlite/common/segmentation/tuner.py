"""The tuner: the state machine behind `auto`, which finds where to cut by measuring.

    warm up -> learn with the first split -> try what the model proposes -> freeze, and watch
                        ^                                                        |
                        +---------- the model or the network has changed --------+

One rank runs it, and all ranks follow its decisions. This module never sends, sleeps or reads a
clock: a decision depends on the observed iterations alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from hvdlite.common.segmentation.cost import Forecast, MeasuredIteration, fit
from hvdlite.common.segmentation.search import Trials, neighbours, robust_cuts, worthwhile
from hvdlite.common.segmentation.strategies import (
    MOST_SEGMENTS,
    Gradient,
    Size,
    check_last_indices,
    split_call,
)

# The drift detector: it notices that a frozen segmentation no longer fits the job.
#
# This module never sends, sleeps or reads a clock.
WINDOW_ITERATIONS = 20
CHANGED = 1.5  # a median that differs from the first window's by this factor is suspicious
CALM = 1.25  # a next window within this factor shows that it was a passing disturbance
# Shorter times count as this share of a step, so that noise in a negligible time is no change.
NEGLIGIBLE = 0.05


class DriftDetector:
    """A comparison of each window of iterations with the first one."""

    def __init__(self) -> None:
        self._window: list[MeasuredIteration] = []
        self._first: tuple[float, ...] | None = None
        self._suspicious = False

    def changed(self, iteration: MeasuredIteration) -> bool:
        """Record an iteration; return whether two windows in a row differ from the first."""
        self._window.append(iteration)
        if len(self._window) < WINDOW_ITERATIONS:
            return False
        now, self._window = _times(self._window), []
        if self._first is None:
            self._first = now
            return False
        factor = _factor(self._first, now)
        if self._suspicious and factor > CALM:
            return True
        self._suspicious = factor > CHANGED
        return False


def _times(window: list[MeasuredIteration]) -> tuple[float, ...]:
    """Return the medians of a window: seconds of step, backward, communication and tail."""
    step = median(iteration.end for iteration in window)
    least = NEGLIGIBLE * step
    return (
        step,
        max(median(iteration.backward_end for iteration in window), least),
        max(median(iteration.communication for iteration in window), least),
        max(median(iteration.tail for iteration in window), least),
    )


def _factor(first: tuple[float, ...], now: tuple[float, ...]) -> float:
    """Return the largest factor by which one of the times has changed, up or down."""
    pairs = [(max(pair), min(pair)) for pair in zip(first, now, strict=True)]
    return max((high / low if low > 0 else 1.0) for high, low in pairs)


WARMUP_ITERATIONS = 3  # of a job: memory is allocated, names are negotiated, caches are cold
LEARN_ITERATIONS = 5  # measured with the first split before anything is proposed
MOST_ROUNDS = 3  # of proposing and trying: each round has measured more sizes than the one before
PROPOSED = 3  # the model's best proposals that one round tries
KEPT = 2  # the best candidates of a round that the next round tries again
# Two segmentations with equally many segments are alike when their cuts differ by less than this
# share of all bytes, and their predicted tails by less than this share.
ALIKE_BYTES = 0.01
ALIKE_TAIL = 0.02


class Decision(NamedTuple):
    """The segmentation that all ranks use from the next iteration on."""

    last_indices: tuple[int, ...]  # of the segments, as of `Strategy.last_indices`
    frozen: bool  # tuning has ended


class Tuner:
    """The search for the segmentation with the shortest tail, one iteration at a time."""

    def __init__(self, gradients: Sequence[Gradient], saved: Sequence[int] | None = None) -> None:
        """Tune at least one gradient; `gradients` are in ready order and stay the same.

        `saved` last indices of an earlier run are frozen until the drift detector sees a change;
        the first `decide` returns them. Raises `ValueError` where they do not fit `gradients`.
        """
        self._gradients = tuple(gradients)
        self._sizes = [gradient.bytes for gradient in gradients]
        self._measured: list[MeasuredIteration] = []  # since learning began
        # Set while candidates alternate; None while learning and while frozen.
        self._trials: Trials | None = None
        # Set while frozen.
        self._drift: DriftDetector | None = None
        self._to_drop = WARMUP_ITERATIONS  # the next iterations, which do not count
        self._rounds = 0
        self._tried: list[tuple[int, ...]] = []
        # Set by a change of segmentation, until `decide` returns it.
        self._decision: Decision | None = None
        self.last_indices: list[int] = Size().last_indices(self._gradients)  # in force
        if saved is not None:
            check_last_indices(saved, self._gradients)
            self._freeze(tuple(saved))
        elif len(self._gradients) == 1:
            self._freeze((0,))

    @property
    def frozen(self) -> bool:
        """Whether tuning has ended, at least until the drift detector sees a change."""
        return self._drift is not None

    @property
    def call(self) -> str:
        """The call that sets the segmentation in force, as source code to paste into a script."""
        return split_call(self.last_indices, self._gradients)

    def observe(self, iteration: MeasuredIteration) -> None:
        """Record the latest iteration.

        An iteration that cannot be compared, with gradients missing or nothing sent, is ignored.
        """
        if len(iteration.ready) != len(self._gradients) or not iteration.segments:
            return
        times = (*iteration.ready, iteration.backward_end, iteration.end)
        if not all(map(math.isfinite, times)):
            return
        if self._to_drop:
            self._to_drop -= 1
        elif self._drift is not None:
            if self._drift.changed(iteration):
                self._restart()
        elif self._trials is not None:
            self._measured.append(iteration)
            self._trials.observe(iteration)
            if self._trials.finished:
                self._propose(self._trials)
            elif self._trials.current != tuple(self.last_indices):
                self._use(self._trials.current, frozen=False)
        else:
            self._measured.append(iteration)
            if len(self._measured) >= LEARN_ITERATIONS:
                self._propose(None)

    def decide(self) -> Decision | None:
        """Return the segmentation that all ranks use from now on; None: the one in force stays."""
        decision, self._decision = self._decision, None
        return decision

    # -- phases

    def _propose(self, trials: Trials | None) -> None:
        """Begin a round of trials with the model's proposals, or freeze the best candidate.

        A round also tries the best candidates of the round before, `trials`, since measurements of
        different rounds cannot be compared where the machine drifts.
        """
        forecast = fit(self._measured, self._sizes)
        ranking = trials.ranking(forecast.tail) if trials else []
        new = [
            candidate
            for candidate in self._candidates(forecast)
            if not any(self._alike(forecast, candidate, tried) for tried in self._tried)
        ]
        if ranking:
            worthwhile_tail = (1 - ALIKE_TAIL) * forecast.tail(ranking[0])
            new = [candidate for candidate in new if forecast.tail(candidate) < worthwhile_tail]
        if ranking and (not new or self._rounds == MOST_ROUNDS):
            self._freeze(ranking[0])
            return
        self._rounds += 1
        self._tried += new
        self._trials = Trials([*ranking[:KEPT], *new])
        self._use(self._trials.current, frozen=False)

    def _candidates(self, forecast: Forecast) -> list[tuple[int, ...]]:
        """Return the model's best proposals, all distinct.

        The first round adds what the rules of thumb derive from the best one, a single segment, and
        HCCL's default: a model of few measurements may be wrong.
        """
        proposals = worthwhile(robust_cuts(forecast, MOST_SEGMENTS))
        candidates = [proposal.last_indices for proposal in proposals[: -PROPOSED - 1 : -1]]
        if self._rounds == 0:
            single = (len(self._gradients) - 1,)
            near = neighbours(forecast.model(0.5), candidates[0])
            candidates += [*near, single, tuple(Size().last_indices(self._gradients))]
        return list(dict.fromkeys(candidates))

    def _alike(self, forecast: Forecast, one: tuple[int, ...], other: tuple[int, ...]) -> bool:
        """Return whether two segmentations are too similar to be worth two trials."""
        if len(one) != len(other):
            return False
        sums = forecast.sums
        distance = max(abs(sums[a] - sums[b]) for a, b in zip(one, other, strict=True))
        if one != other and distance > ALIKE_BYTES * sums[-1]:
            return False
        tails = forecast.tail(one), forecast.tail(other)
        return abs(tails[0] - tails[1]) <= ALIKE_TAIL * max(tails)

    def _freeze(self, last_indices: tuple[int, ...]) -> None:
        self._drift = DriftDetector()
        self._trials = None
        self._measured = []
        self._to_drop = max(self._to_drop, 1)  # the first iteration pays for the new segments
        self._use(last_indices, frozen=True)

    def _restart(self) -> None:
        self._drift = None
        self._tried = []
        self._rounds = 0
        self._use(tuple(self.last_indices), frozen=False)

    def _use(self, last_indices: tuple[int, ...], frozen: bool) -> None:
        self.last_indices = list(last_indices)
        self._decision = Decision(last_indices, frozen)
