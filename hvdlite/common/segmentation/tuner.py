"""Finds where to cut by measuring: the state machine behind `auto`.

    warm up -> learn with the first split -> try what the model proposes -> freeze, and watch
                        ^                                                        |
                        +---------- the model or the network has changed --------+

It runs on one rank, and all ranks follow what it decides. This module never sends, sleeps or reads
a clock: it is a function of the iterations that it is told of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.common.segmentation.boundaries import check_ends, pasted
from hvdlite.common.segmentation.cost import Forecast, Iteration, fit
from hvdlite.common.segmentation.drift_detector import Watch
from hvdlite.common.segmentation.search import neighbours, robust_cuts, worthwhile
from hvdlite.common.segmentation.strategies import MOST_SEGMENTS, Gradient, Size
from hvdlite.common.segmentation.trials import Trials

WARMUP_ITERATIONS = 3  # of a job: memory is allocated, names are negotiated, caches are cold
LEARN_ITERATIONS = 5  # with the first split, before anything is proposed
MOST_ROUNDS = 3  # of proposing and trying: each knows more sizes of segments than the one before
PROPOSED = 3  # of the model's best, in one round
KEPT = 2  # of a round, that are tried again in the next one
ALIKE_BYTES = 0.01  # cuts that differ by less than this share of all bytes are the same...
ALIKE_TAIL = 0.02  # ...when the tails that are predicted differ by less than this share


class Decision(NamedTuple):
    """What all ranks shall use from the next iteration on."""

    ends: tuple[int, ...]  # the last index of each segment, as of `Strategy.ends`
    frozen: bool  # nothing is tried any more


class Tuner:
    """Observes iterations, and decides which segmentation the next ones have."""

    def __init__(self, gradients: Sequence[Gradient], known: Sequence[int] | None = None) -> None:
        """For these gradients, at least one, in ready order; other gradients are another tuner.

        With `known` ends, of an earlier run, nothing is tried until something changes by much; the
        first `decide` tells of them. Raises `ValueError` where they are not of these gradients.
        """
        self._gradients = tuple(gradients)
        self._sizes = [each.bytes for each in gradients]
        self._seen: list[Iteration] = []  # since learning began
        self._trials: Trials | None = None
        self._watch: Watch | None = None
        self._to_drop = WARMUP_ITERATIONS
        self._rounds = 0
        self._tried: list[tuple[int, ...]] = []
        self._decision: Decision | None = None
        self.ends: list[int] = Size().ends(self._gradients)  # in force
        if known is not None:
            check_ends(known, self._gradients)
            self._freeze(tuple(known))
        elif len(self._gradients) == 1:
            self._freeze((0,))

    @property
    def frozen(self) -> bool:
        """Whether nothing is tried at present."""
        return self._watch is not None

    @property
    def text(self) -> str:
        """The segmentation in force, as a line that can be pasted into a script."""
        return pasted(self.ends, self._gradients)

    def observe(self, iteration: Iteration) -> None:
        """Take in what was measured of the latest iteration.

        One that cannot be compared, with gradients missing or nothing sent, does not count.
        """
        if not self._counts(iteration):
            return
        if self._to_drop:
            self._to_drop -= 1
        elif self._watch is not None:
            if self._watch.changed(iteration):
                self._begin_again()
        elif self._trials is not None:
            self._seen.append(iteration)
            self._try(self._trials, iteration)
        else:
            self._seen.append(iteration)
            if len(self._seen) >= LEARN_ITERATIONS:
                self._propose(None)

    def decide(self) -> Decision | None:
        """What all ranks shall use from the next iteration on; None: go on as it is."""
        decision, self._decision = self._decision, None
        return decision

    # -- phases

    def _try(self, trials: Trials, iteration: Iteration) -> None:
        trials.observe(iteration)
        if trials.finished:
            self._propose(trials)
        elif trials.current != tuple(self.ends):
            self._use(trials.current, frozen=False)

    def _propose(self, tried: Trials | None) -> None:
        """Try what the model proposes now, beside the best of those tried; or freeze the best."""
        forecast = fit(self._seen, self._sizes)
        ranking = tried.ranking(forecast.tail) if tried else []
        new = [ends for ends in self._candidates(forecast) if not self._known(forecast, ends)]
        if ranking:
            worth_it = (1 - ALIKE_TAIL) * forecast.tail(ranking[0])
            new = [ends for ends in new if forecast.tail(ends) < worth_it]
        if ranking and (not new or self._rounds == MOST_ROUNDS):
            self._freeze(ranking[0])
            return
        self._rounds += 1
        self._tried += new
        self._trials = Trials([*ranking[:KEPT], *new])
        self._use(self._trials.current, frozen=False)

    def _candidates(self, forecast: Forecast) -> list[tuple[int, ...]]:
        """The few best, those of the rules beside the best, one segment, and HCCL's; distinct."""
        proposals = worthwhile(robust_cuts(forecast, MOST_SEGMENTS))
        found = [proposal.ends for proposal in proposals[: -PROPOSED - 1 : -1]]
        if self._rounds == 0:
            one = (len(self._gradients) - 1,)
            near = neighbours(forecast.model(0.5), found[0])
            found += [*near, one, tuple(Size().ends(self._gradients))]
        return list(dict.fromkeys(found))

    def _known(self, forecast: Forecast, ends: tuple[int, ...]) -> bool:
        """Whether it was tried already, or something that is hardly different."""
        return any(self._alike(forecast, ends, tried) for tried in self._tried)

    def _alike(self, forecast: Forecast, ends: tuple[int, ...], other: tuple[int, ...]) -> bool:
        if len(ends) != len(other):
            return False
        sums = forecast.sums
        apart = max(abs(sums[a] - sums[b]) for a, b in zip(ends, other, strict=True))
        if ends != other and apart > ALIKE_BYTES * sums[-1]:
            return False
        tails = forecast.tail(ends), forecast.tail(other)
        return abs(tails[0] - tails[1]) <= ALIKE_TAIL * max(tails)

    def _freeze(self, ends: tuple[int, ...]) -> None:
        self._watch = Watch()
        self._trials = None
        self._seen = []
        self._to_drop = max(self._to_drop, 1)  # the first one with other segments
        self._use(ends, frozen=True)

    def _begin_again(self) -> None:
        self._watch = None
        self._tried = []
        self._rounds = 0
        self._use(tuple(self.ends), frozen=False)

    def _use(self, ends: tuple[int, ...], frozen: bool) -> None:
        self.ends = list(ends)
        self._decision = Decision(ends, frozen)

    # -- checks

    def _counts(self, iteration: Iteration) -> bool:
        if len(iteration.ready) != len(self._gradients) or not iteration.segments:
            return False
        return all(map(math.isfinite, (*iteration.ready, iteration.backward_end, iteration.end)))
