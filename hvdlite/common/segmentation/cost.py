"""What a segmentation costs, by a model that is fitted from measurements.

A gradient is ready at a known time of backward; one reduction takes latency + bytes / bandwidth,
but for what was measured of its size; segments run one after another. This module never sends,
sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Of a reduction, as far as one size of segments cannot tell; no more than half of its time.
TYPICAL_LATENCY_SECONDS = 1e-4
SIZES_AN_OCTAVE = 4  # that are told apart where the line is corrected


class Iteration(NamedTuple):
    """What one rank measured of one iteration: seconds of one clock, from its start."""

    ready: tuple[float, ...]  # when gradient i, in ready order, was complete
    segments: tuple[tuple[int, float, float], ...]  # bytes, start, end of each reduction
    backward_end: float
    end: float  # the last reduction has ended, and the results are back

    @property
    def tail(self) -> float:
        """Seconds of communication that backward does not hide."""
        return self.end - self.backward_end

    @property
    def communication(self) -> float:
        """Seconds of all reductions."""
        return sum(end - start for _, start, end in self.segments)


class ReductionCost(NamedTuple):
    """What a reduction takes: a line, times what was measured of sizes where that differs from it.

    Caches and windows of protocols make large ones, or small ones, slower than any line says.
    """

    latency: float  # seconds
    seconds_per_byte: float
    corrections: tuple[tuple[float, float], ...] = ()  # logarithm of bytes, ascending; a factor

    def seconds(self, nbytes: Floats) -> Floats:
        """Of reductions of so many bytes."""
        line = self.latency + self.seconds_per_byte * nbytes
        if not self.corrections:
            return line
        sizes, factors = zip(*self.corrections, strict=True)
        corrected: Floats = line * np.interp(_octaves(nbytes), sizes, factors)
        return corrected


class CostModel:
    """Predicts when each reduction of a segmentation runs.

    A segment is counted as one reduction, also where it holds two dtypes.
    """

    def __init__(
        self,
        ready: Sequence[float] | Floats,
        sizes: Sequence[int],
        backward_end: float,
        cost: ReductionCost,
    ) -> None:
        """`ready` seconds and `sizes` in bytes of the gradients, in the order in which they go."""
        self.ready: Floats = np.maximum.accumulate(np.asarray(ready, dtype=np.float64))
        self.sums: Floats = np.cumsum(np.asarray(sizes, dtype=np.float64))
        self.backward_end = backward_end
        self.cost = cost

    def runs(self, ends: Sequence[int]) -> list[tuple[float, float]]:
        """Start and end of each reduction, seconds."""
        runs: list[tuple[float, float]] = []
        free = 0.0
        last = list(ends)
        took = self.cost.seconds(np.diff(self.sums[last], prepend=0.0))
        for ready, seconds in zip(self.ready[last].tolist(), took.tolist(), strict=True):
            start = max(free, ready)
            free = start + seconds
            runs.append((start, free))
        return runs

    def tail(self, ends: Sequence[int]) -> float:
        """Seconds from the end of backward to the end of the last reduction."""
        return self.runs(ends)[-1][1] - self.backward_end


class Forecast:
    """What iterations like those that were seen take with a segmentation.

    Times of backward vary, and not alike in both directions: a gradient that is late lengthens the
    tail, one that is early shortens nothing. So a tail is the mean of those of all iterations.
    """

    def __init__(
        self, iterations: Sequence[Iteration], sizes: Sequence[int], cost: ReductionCost
    ) -> None:
        """`iterations`: at least one; `sizes` in bytes of the gradients, in ready order."""
        ready = np.array([each.ready for each in iterations], dtype=np.float64)
        self._ready: Floats = np.maximum.accumulate(ready, axis=1)  # (iterations, gradients)
        self._backward_end: Floats = np.array([each.backward_end for each in iterations])
        self._sizes = sizes
        self._cost = cost
        self.sums: Floats = np.cumsum(np.asarray(sizes, dtype=np.float64))

    def tail(self, ends: Sequence[int]) -> float:
        """Seconds from the end of backward to the end of the last reduction, on average."""
        last = list(ends)
        took = self._cost.seconds(np.diff(self.sums[last], prepend=0.0))
        free = np.zeros(len(self._backward_end))
        for end, seconds in zip(last, took.tolist(), strict=True):
            free = np.maximum(free, self._ready[:, end]) + seconds
        return float(np.mean(free - self._backward_end))

    def model(self, lateness: float) -> CostModel:
        """One iteration in the place of all: `lateness` is the quantile that is ready by then.

        0.5 is the median; with more, less of backward is left when a gradient is ready.
        """
        backward_end = float(np.median(self._backward_end))
        left = np.quantile(self._backward_end[:, None] - self._ready, 1 - lateness, axis=0)
        ready = np.maximum(backward_end - left, 0.0)
        return CostModel(ready, self._sizes, backward_end, self._cost)


def fit(iterations: Sequence[Iteration], sizes: Sequence[int]) -> Forecast:
    """The forecast from these iterations, at least one, with a reduction in it."""
    cost = fit_reductions(
        [
            (nbytes, end - start)
            for iteration in iterations
            for nbytes, start, end in iteration.segments
        ]
    )
    return Forecast(iterations, sizes, cost)


def fit_reductions(reductions: Sequence[tuple[int, float]]) -> ReductionCost:
    """The cost by (bytes, seconds), at least one of them."""
    line = ReductionCost(*_fit_line(reductions))
    nbytes, seconds = np.array(reductions, dtype=np.float64).T
    expected = line.seconds(nbytes)
    octaves = _octaves(nbytes)
    factors = np.where(expected > 0, seconds / np.maximum(expected, 1e-12), 1.0)
    alike = np.round(octaves * SIZES_AN_OCTAVE)
    corrections = [
        (float(np.median(octaves[alike == each])), float(np.median(factors[alike == each])))
        for each in np.unique(alike)
    ]
    return line._replace(corrections=tuple(corrections))


def _octaves(nbytes: Floats) -> Floats:
    octaves: Floats = np.log2(nbytes + 1)
    return octaves


def _fit_line(reductions: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Latency in seconds, and seconds per byte.

    The line is that of Theil and Sen, through the median of each size: a pair of sizes counts by
    their distance, and a reduction for the latency by how short it is. Neither is ever negative.
    """
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in reductions:
        by_size.setdefault(nbytes, []).append(seconds)
    sizes = np.array(sorted(by_size), dtype=np.float64)
    times = np.array([np.median(by_size[int(size)]) for size in sizes])
    if len(sizes) == 1:
        latency = min(TYPICAL_LATENCY_SECONDS, times[0] / 2)
        return float(latency), float((times[0] - latency) / max(sizes[0], 1))
    first, second = np.triu_indices(len(sizes), 1)
    distances = sizes[second] - sizes[first]
    slope = max(_weighted_median((times[second] - times[first]) / distances, distances), 0.0)
    latency = _weighted_median(times - slope * sizes, 1 / np.maximum(times, 1e-9))
    return max(latency, 0.0), slope


def _weighted_median(values: Floats, weights: Any) -> float:
    order = np.argsort(values)
    reached = np.cumsum(np.asarray(weights)[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
