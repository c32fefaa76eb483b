"""The cost model of segmentations, fitted from measured iterations.

A gradient becomes ready at a known time of backward. A reduction takes latency + bytes / bandwidth,
corrected by what was measured of its size. Segments are reduced one after another. This module
never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# One size of segments cannot tell latency from bandwidth: this latency is assumed then, but at most
# half of the measured time.
TYPICAL_LATENCY_SECONDS = 1e-4
SIZES_AN_OCTAVE = 4  # the resolution of the corrections: sizes closer than this share a factor


class MeasuredIteration(NamedTuple):
    """The times of one iteration, in seconds from its start, on the clock of rank 0."""

    ready: tuple[float, ...]  # by gradient in ready order: when the last rank had it
    segments: tuple[tuple[int, float, float], ...]  # bytes, start, end of each reduction
    backward_end: float
    end: float  # the results of the last reduction are back

    @property
    def tail(self) -> float:
        """The seconds of communication that backward does not hide."""
        return self.end - self.backward_end

    @property
    def communication(self) -> float:
        """The seconds of all reductions together."""
        return sum(end - start for _, start, end in self.segments)


class ReductionCost(NamedTuple):
    """The duration of a reduction: a line over its bytes, times a measured correction.

    The corrections are needed because caches and protocol windows make some sizes slower than any
    line predicts.
    """

    latency: float  # seconds
    seconds_per_byte: float
    corrections: tuple[tuple[float, float], ...] = ()  # (log2 of bytes + 1, factor), ascending

    def seconds(self, nbytes: Floats) -> Floats:
        """Return the seconds of reductions of `nbytes` each, an array of any shape."""
        line = self.latency + self.seconds_per_byte * nbytes
        if not self.corrections:
            return line
        sizes, factors = zip(*self.corrections, strict=True)
        corrected: Floats = line * np.interp(_octaves(nbytes), sizes, factors)
        return corrected


class CostModel:
    """The prediction of when each reduction of a segmentation runs.

    A segment counts as one reduction, also where it holds two dtypes.
    """

    def __init__(
        self,
        ready: Sequence[float] | Floats,
        sizes: Sequence[int],
        backward_end: float,
        cost: ReductionCost,
    ) -> None:
        """Model gradients with these `ready` seconds and `sizes` in bytes, in ready order."""
        self.ready: Floats = np.maximum.accumulate(np.asarray(ready, dtype=np.float64))
        self.sums: Floats = np.cumsum(np.asarray(sizes, dtype=np.float64))
        self.backward_end = backward_end
        self.cost = cost

    def segment_bytes(self, last_indices: Sequence[int]) -> list[float]:
        segment_bytes: list[float] = np.diff(self.sums[list(last_indices)], prepend=0.0).tolist()
        return segment_bytes

    def reductions(self, last_indices: Sequence[int]) -> list[tuple[float, float]]:
        """Return the start and the end of each reduction, seconds.

        A reduction starts when the last gradient of its segment is ready and the reduction before
        it has ended.
        """
        reductions: list[tuple[float, float]] = []
        free = 0.0
        durations = self.cost.seconds(np.array(self.segment_bytes(last_indices)))
        ready_times = self.ready[list(last_indices)]
        for ready, duration in zip(ready_times.tolist(), durations.tolist(), strict=True):
            start = max(free, ready)
            free = start + duration
            reductions.append((start, free))
        return reductions

    def tail(self, last_indices: Sequence[int]) -> float:
        """Return the seconds from the end of backward to the end of the last reduction."""
        return self.reductions(last_indices)[-1][1] - self.backward_end


class Forecast:
    """The mean tail of a segmentation over the measured iterations.

    One typical iteration would not do: a gradient that is late lengthens the tail, and one that is
    early shortens nothing, so the mean tail is longer than the tail of the mean iteration.
    """

    def __init__(
        self, iterations: Sequence[MeasuredIteration], sizes: Sequence[int], cost: ReductionCost
    ) -> None:
        """Forecast from at least one iteration; `sizes` are the gradients' bytes in ready order."""
        ready = np.array([iteration.ready for iteration in iterations], dtype=np.float64)
        self._ready: Floats = np.maximum.accumulate(ready, axis=1)  # (iterations, gradients)
        self._backward_end: Floats = np.array(
            [iteration.backward_end for iteration in iterations], dtype=np.float64
        )
        self._sizes = sizes
        self._cost = cost
        self.sums: Floats = np.cumsum(np.asarray(sizes, dtype=np.float64))

    def tail(self, last_indices: Sequence[int]) -> float:
        """Return the mean seconds from the end of backward to the end of the last reduction."""
        last = list(last_indices)
        durations = self._cost.seconds(np.diff(self.sums[last], prepend=0.0))
        free = np.zeros(len(self._backward_end))
        for index, duration in zip(last, durations.tolist(), strict=True):
            free = np.maximum(free, self._ready[:, index]) + duration
        return float(np.mean(free - self._backward_end))

    def model(self, lateness: float) -> CostModel:
        """Return the model of one iteration whose ready times are the quantile `lateness`.

        0.5 is the median. The larger the quantile, the later gradients become ready in backward.
        """
        backward_end = float(np.median(self._backward_end))
        left = np.quantile(self._backward_end[:, None] - self._ready, 1 - lateness, axis=0)
        ready = np.maximum(backward_end - left, 0.0)
        return CostModel(ready, self._sizes, backward_end, self._cost)


def fit(iterations: Sequence[MeasuredIteration], sizes: Sequence[int]) -> Forecast:
    """Return the forecast from at least one iteration; one of them has a reduction."""
    cost = fit_reductions(
        [
            (nbytes, end - start)
            for iteration in iterations
            for nbytes, start, end in iteration.segments
        ]
    )
    return Forecast(iterations, sizes, cost)


def fit_reductions(reductions: Sequence[tuple[int, float]]) -> ReductionCost:
    """Return the cost fitted from at least one pair of bytes and seconds."""
    line = ReductionCost(*_fit_line(reductions))
    nbytes, seconds = np.array(reductions, dtype=np.float64).T
    expected = line.seconds(nbytes)
    octaves = _octaves(nbytes)
    factors = np.where(expected > 0, seconds / np.maximum(expected, 1e-12), 1.0)
    bins = np.round(octaves * SIZES_AN_OCTAVE)
    corrections = [
        (float(np.median(octaves[bins == index])), float(np.median(factors[bins == index])))
        for index in np.unique(bins)
    ]
    return line._replace(corrections=tuple(corrections))


def _octaves(nbytes: Floats) -> Floats:
    octaves: Floats = np.log2(nbytes + 1)
    return octaves


def _fit_line(reductions: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return the latency in seconds and the seconds per byte, neither of them negative.

    This is the Theil-Sen estimator (Theil 1950, Sen 1968), which outliers do not move: the slope is
    the median of the slopes of all pairs. Pairs of sizes are weighted by their distance, since the
    noise of a short one makes its slope useless. The latency is the median of the residuals,
    weighted towards short reductions, which it dominates.
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
