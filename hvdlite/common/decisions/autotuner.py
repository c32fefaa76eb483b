"""Tries other settings while the job runs, and keeps the best: what `--autotune` does.

    warm up -> fusion threshold and cycle time together -> plane, pieces, cache, one by one
            -> the best against the defaults, in turns -> the winner

It runs on rank 0, and all ranks follow by an order. This module never sends, sleeps or reads a
clock: it is a function of the reductions that it is told of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from statistics import median
from typing import Any, NamedTuple

from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.ring import PIECE_BYTES
from hvdlite.common.decisions.gaussian_process import Point, most_promising
from hvdlite.common.plain.config import MIB, Config
from hvdlite.common.plain.messages import Retune

MEASUREMENTS = 5  # the median of which is a sample
DUELS = 3  # samples of the best, and of the defaults, at the end
WORTH = 0.02  # of the score: what a change has to gain
MOST_NAMES = 1 << 16  # of tensors that are counted: those without a name come only once
THRESHOLDS = tuple(MIB << power for power in range(9))  # 1 to 256 MiB
CYCLES_MS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
PIECES = (PIECE_BYTES // 4, PIECE_BYTES * 4)  # beside the default

# A sample to be taken of a setting, and its score: bytes per microsecond.
_Search = Generator[Retune, float, Retune]


class Trial(NamedTuple):
    """One line of the log."""

    values: Retune
    hierarchical: bool  # allreduce inside hosts first, then between them
    score: float  # bytes per microsecond


class Autotuner:
    """Takes in reductions of all ranks, and says when all shall go on with other settings."""

    def __init__(self, config: Config, topology: Topology) -> None:
        """Starts from the settings of `config`, and leaves alone those that the user has made."""
        self._steps = config.autotune_steps_per_sample
        self._to_drop = config.autotune_warmup_samples
        self._most_samples = config.autotune_max_samples
        self._noise = config.autotune_noise
        self._defaults = _defaults(config)
        self._joint = _joint(config)
        self._layered = layered(topology) and config.allreduce in ("auto", "hierarchical")
        self._single = _single(config, topology)
        self._values = self._defaults
        self._trials: list[Trial] = []
        self._search: _Search | None = self._find()
        next(self._search)
        self._waits = False  # until what was decided last is in force
        self._measured: list[float] = []
        self._sample: _Sample | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing is tried any more."""
        return self._search is None

    @property
    def text(self) -> str:
        """The settings decided last, as far as there are flags for them."""
        values = self._values
        words = [
            f"--fusion-threshold-mb {values.fusion_threshold_bytes / MIB:g}",
            f"--cycle-time-ms {values.cycle_time_ms:g}",
            f"--cache-capacity {values.cache_capacity}",
        ]
        if values.allreduce:
            words.append(f"--allreduce {values.allreduce}")
        return " ".join(words)

    def observe(self, names: Sequence[str], nbytes: int, end: float) -> Retune | None:
        """A reduction of tensors of these names ended at `end` seconds.

        Returns what all ranks shall go on with, where that changes.
        """
        if self._search is None or self._waits:
            return None
        if self._sample is None or self._sample.aimless:
            self._sample = _Sample(names, end)
            return None
        self._sample.add(names, nbytes, end)
        if self._sample.steps < self._steps:
            return None
        self._measured.append(self._sample.score)
        self._sample = _Sample(names, end)
        if len(self._measured) < MEASUREMENTS:
            return None
        score, self._measured = median(self._measured), []
        if self._to_drop:
            self._to_drop -= 1
            return None
        return self._go_on(self._search, score)

    def in_force(self) -> None:
        """What `observe` returned last holds now: measure it."""
        self._waits = False
        self._sample = None

    def take_trials(self) -> list[Trial]:
        """What was measured since the last call; when the search has ended, the best comes last."""
        trials, self._trials = self._trials, []
        return trials

    def _go_on(self, search: _Search, score: float) -> Retune | None:
        self._trials.append(self._trial(self._values, score))
        try:
            values = search.send(score)
        except StopIteration as stopped:
            values = stopped.value
            self._search = None
        if values == self._values:
            return None
        self._values = values
        self._waits = True
        return values

    # -- the search: it yields what to measure, and is sent the score

    def _find(self) -> _Search:
        scores: dict[Retune, list[float]] = {self._defaults: []}
        scores[self._defaults].append((yield self._defaults))
        yield from self._find_joint(scores)
        best = max(scores, key=lambda values: median(scores[values]))
        for change in self._single:
            values = best._replace(**change)
            scores[values] = [(yield values)]
            if _worth_it(scores[values], scores[best]):
                best = values
        if best != self._defaults:
            best = yield from self._duel(best, scores)
        self._trials.append(self._trial(best, median(scores[best])))
        return best

    def _trial(self, values: Retune, score: float) -> Trial:
        return Trial(values, self._layered and values.allreduce != "ring", score)

    def _find_joint(self, scores: dict[Retune, list[float]]) -> Generator[Retune, float, None]:
        """Bayesian optimisation: measure where the largest improvement is to be expected."""
        points = {values: point for values, point in self._joint.items() if values not in scores}
        for _ in range(min(self._most_samples - 1, len(points))):
            measured = [(self._joint[v], median(each)) for v, each in scores.items()]
            left = list(points)
            values = left[most_promising(measured, list(points.values()), self._noise)]
            del points[values]
            scores[values] = [(yield values)]

    def _duel(self, best: Retune, scores: dict[Retune, list[float]]) -> _Search:
        """Measure the best and the defaults again, in turns: the defaults win a tie.

        The best of many was lucky, too: what it scored before does not count.
        """
        scores[best], scores[self._defaults] = [], []
        for _ in range(DUELS):
            for values in (best, self._defaults):
                scores[values].append((yield values))
        return best if _worth_it(scores[best], scores[self._defaults]) else self._defaults


class _Sample:
    """Bytes and steps since a reduction, of which only the end counts."""

    def __init__(self, names: Sequence[str], end: float) -> None:
        self._start = end
        self._bytes = 0
        self._seen = Counter(names)
        self.steps = 0  # how often some tensor has come again
        self.score = 0.0  # bytes per microsecond

    @property
    def aimless(self) -> bool:
        """Whether so many tensors came that hardly any seems to come again."""
        return len(self._seen) > MOST_NAMES

    def add(self, names: Sequence[str], nbytes: int, end: float) -> None:
        """Count a reduction."""
        self._bytes += nbytes
        self._seen.update(names)
        self.steps = max(self.steps, *(self._seen[name] - 1 for name in names))
        self.score = self._bytes / max((end - self._start) * 1e6, 1.0)


def layered(topology: Topology) -> bool:
    """Whether there are several hosts, and several ranks on one of them."""
    return len(topology.hosts) > 1 and any(len(host) > 1 for host in topology.hosts)


def _worth_it(scores: Sequence[float], others: Sequence[float]) -> bool:
    """Whether these are better by more than noise."""
    return median(scores) > (1 + WORTH) * median(others)


def _defaults(config: Config) -> Retune:
    return Retune(
        config.fusion_threshold_bytes,
        config.cycle_time_ms,
        config.cache_capacity,
        "auto" if _plane_is_free(config) else "",
        PIECE_BYTES,
    )


def _plane_is_free(config: Config) -> bool:
    return not {"allreduce", "hierarchical_allreduce"} & config.given and config.allreduce == "auto"


def _joint(config: Config) -> dict[Retune, Point]:
    """What is tuned together, with each value's place in the unit square, the default first."""
    defaults = _defaults(config)
    thresholds = [defaults.fusion_threshold_bytes]
    if "fusion_threshold_bytes" not in config.given:
        thresholds += THRESHOLDS
    cycles = [defaults.cycle_time_ms]
    if "cycle_time_ms" not in config.given:
        cycles += CYCLES_MS
    return {
        defaults._replace(fusion_threshold_bytes=threshold, cycle_time_ms=cycle): (
            _place(threshold, thresholds),
            _place(cycle, cycles),
        )
        for threshold in thresholds
        for cycle in cycles
    }


def _place(value: float, values: Sequence[float]) -> float:
    """From 0 to 1: the share of the values that are smaller, so that steps are even."""
    ordered = sorted(set(values))
    return ordered.index(value) / max(len(ordered) - 1, 1)


def _single(config: Config, topology: Topology) -> list[dict[str, Any]]:
    """Changes that are tried one by one, each beside the best so far."""
    changes: list[dict[str, Any]] = []
    if layered(topology) and _plane_is_free(config):
        changes.append({"allreduce": "ring"})
    if len(topology.hosts) > 1 and config.allreduce in ("auto", "ring", "hierarchical"):
        changes += [{"piece_bytes": piece} for piece in PIECES]
    if "cache_capacity" not in config.given:
        changes.append({"cache_capacity": 0})
    return changes
