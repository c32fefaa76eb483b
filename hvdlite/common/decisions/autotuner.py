"""The autotuner of `--autotune`: tries other settings while the job runs, and keeps the best.

    warm up -> fusion threshold and cycle time together -> plane, pieces, cache, one by one
            -> the best against the defaults, in turns -> the winner

It runs on rank 0, and all ranks follow its orders. This module never sends, sleeps or reads a
clock: its decisions depend only on the reductions that it observes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from statistics import median
from typing import Any, NamedTuple

from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.between_hosts.costs import PIECE_BYTES
from hvdlite.common.requests.messages import Retune
from hvdlite.common.settings.config import Config
from hvdlite.common.settings.setting import MIB

MEASUREMENTS = 5  # A sample is the median of so many measurements.
DUELS = 3  # Samples of the best and of the default settings at the end.
WORTH = 0.02  # The share of the score that a change has to gain.
# Names that a measurement counts. Calls without a name get a new name each, which never comes
# again, so a job of only such calls has no steps to count.
MOST_NAMES = 1 << 16
THRESHOLDS = tuple(MIB << power for power in range(9))  # 1 to 256 MiB.
CYCLES_MS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0)
# Neighbours of the best on the grid of both, as a pattern search looks at them (Hooke and Jeeves,
# "Direct Search Solution of Numerical and Statistical Problems", 1961): far ones, then near ones.
STRIDES = (3, 1)
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))
PIECES = (PIECE_BYTES // 4, PIECE_BYTES * 4)  # Tried beside the default.

# Yields the settings to measure, is sent their score in bytes per microsecond, returns the winner.
_Search = Generator[Retune, float, Retune]


class Sample(NamedTuple):
    """The score of some settings: one line of the log."""

    values: Retune
    hierarchical: bool  # Whether allreduce runs inside hosts first, then between them.
    score: float  # In bytes per microsecond.


class Autotuner:
    """The search for the best settings: observes reductions, decides when to change settings."""

    def __init__(self, config: Config, topology: Topology) -> None:
        """Start from the settings of `config`; settings that the user has made stay unchanged."""
        self._steps = config.autotune_steps_per_sample
        self._to_drop = config.autotune_warmup_samples
        self._most_samples = config.autotune_max_samples
        self._defaults = _defaults(config)
        self._grid = _grid(config)
        self._layered = layered(topology) and config.allreduce not in ("ring", "shm", "mpi")
        self._single = _single(config, topology)
        self._values = self._defaults
        self._samples: list[Sample] = []
        self._search: _Search | None = self._find()
        next(self._search)
        # Set from a decision until all ranks have executed it. Reductions before that count for
        # neither setting.
        self._retune_pending = False
        self._measured: list[float] = []  # The scores of the sample that is being measured.
        # None until the first reduction with the current settings, whose end starts the clock.
        self._measurement: _Measurement | None = None

    @property
    def finished(self) -> bool:
        return self._search is None

    @property
    def text(self) -> str:
        """The current settings as flags of hvdlite-run; settings without a flag are left out."""
        values = self._values
        flags = [
            f"--fusion-threshold-mb {values.fusion_threshold_bytes / MIB:g}",
            f"--cycle-time-ms {values.cycle_time_ms:g}",
            f"--cache-capacity {values.cache_capacity}",
        ]
        if values.allreduce:
            flags.append(f"--allreduce {values.allreduce}")
        return " ".join(flags)

    def observe(self, names: Sequence[str], nbytes: int, end: float) -> Retune | None:
        """Record a reduction of tensors of these names that ended at `end` seconds.

        Returns the settings for all ranks if they change, otherwise None.
        """
        if self._search is None or self._retune_pending:
            return None
        if self._measurement is None or self._measurement.overfull:
            self._measurement = _Measurement(names, end)
            return None
        self._measurement.add(names, nbytes, end)
        if self._measurement.steps < self._steps:
            return None
        self._measured.append(self._measurement.score)
        self._measurement = _Measurement(names, end)
        if len(self._measured) < MEASUREMENTS:
            return None
        score, self._measured = median(self._measured), []
        if self._to_drop:
            self._to_drop -= 1
            return None
        return self._continue_search(self._search, score)

    def settings_applied(self) -> None:
        """Measure the settings that `observe` returned last: all ranks use them now."""
        self._retune_pending = False
        self._measurement = None

    def pop_samples(self) -> list[Sample]:
        """Return the samples since the last call; after the search, the last one is the winner."""
        samples, self._samples = self._samples, []
        return samples

    def _continue_search(self, search: _Search, score: float) -> Retune | None:
        self._samples.append(self._sample_of(self._values, score))
        try:
            values = search.send(score)
        except StopIteration as stopped:
            values = stopped.value
            self._search = None
        if values == self._values:
            return None
        self._values = values
        self._retune_pending = True
        return values

    # -- the search, as generators (see `_Search`)

    def _find(self) -> _Search:
        scores = {self._defaults: [(yield self._defaults)]}
        yield from self._find_on_grid(scores)
        best = _best(scores)
        for change in self._single:
            values = best._replace(**change)
            scores[values] = [(yield values)]
            if _worth_it(scores[values], scores[best]):
                best = values
        if best != self._defaults:
            # Measure both again, in turns: the best of many candidates owes part of its score to
            # luck, so old scores do not count. The defaults win a tie.
            scores[best], scores[self._defaults] = [], []
            for _ in range(DUELS):
                for values in (best, self._defaults):
                    scores[values].append((yield values))
            if not _worth_it(scores[best], scores[self._defaults]):
                best = self._defaults
        self._samples.append(self._sample_of(best, median(scores[best])))
        return best

    def _find_on_grid(self, scores: dict[Retune, list[float]]) -> Generator[Retune, float, None]:
        """Measure what lies around the best, until nothing there is new or samples are spent."""
        places = {values: place for place, values in self._grid.items()}
        for stride in STRIDES:
            while len(scores) < self._most_samples:
                row, column = places[_best(scores)]
                around = (
                    self._grid.get((row + x * stride, column + y * stride)) for x, y in DIRECTIONS
                )
                new = next((values for values in around if values and values not in scores), None)
                if new is None:
                    break
                scores[new] = [(yield new)]

    def _sample_of(self, values: Retune, score: float) -> Sample:
        return Sample(values, self._layered and values.allreduce != "ring", score)


class _Measurement:
    """The bytes and steps since the end of a first reduction, which starts the clock."""

    def __init__(self, names: Sequence[str], end: float) -> None:
        self._start = end
        self._bytes = 0
        self._seen = Counter(names)
        self.steps = 0  # How often the most frequent tensor has come again.
        self.score = 0.0  # In bytes per microsecond.

    @property
    def overfull(self) -> bool:
        """Whether there are so many names that hardly any tensor seems to come again."""
        return len(self._seen) > MOST_NAMES

    def add(self, names: Sequence[str], nbytes: int, end: float) -> None:
        self._bytes += nbytes
        self._seen.update(names)
        self.steps = max(self.steps, *(self._seen[name] - 1 for name in names))
        self.score = self._bytes / max((end - self._start) * 1e6, 1.0)


def layered(topology: Topology) -> bool:
    """Return whether there are several hosts, and several ranks on one of them."""
    return len(topology.hosts) > 1 and any(len(host) > 1 for host in topology.hosts)


def _best(scores: dict[Retune, list[float]]) -> Retune:
    return max(scores, key=lambda values: median(scores[values]))


def _worth_it(scores: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether these scores are better by more than noise."""
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


def _grid(config: Config) -> dict[tuple[int, int], Retune]:
    """Return the settings that are tuned together, by the places of their values."""
    defaults = _defaults(config)
    thresholds = {defaults.fusion_threshold_bytes}
    if "fusion_threshold_bytes" not in config.given:
        thresholds |= {*THRESHOLDS}
    cycles = {defaults.cycle_time_ms}
    if "cycle_time_ms" not in config.given:
        cycles |= {*CYCLES_MS}
    return {
        (row, column): defaults._replace(fusion_threshold_bytes=threshold, cycle_time_ms=cycle)
        for row, threshold in enumerate(sorted(thresholds))
        for column, cycle in enumerate(sorted(cycles))
    }


def _single(config: Config, topology: Topology) -> list[dict[str, Any]]:
    """Return the changes that are tried one by one, each on top of the best so far."""
    changes: list[dict[str, Any]] = []
    if layered(topology) and _plane_is_free(config):
        changes.append({"allreduce": "ring"})
    if len(topology.hosts) > 1 and config.allreduce not in ("shm", "mpi"):
        changes += [{"piece_bytes": piece} for piece in PIECES]
    if "cache_capacity" not in config.given:
        changes.append({"cache_capacity": 0})
    return changes
