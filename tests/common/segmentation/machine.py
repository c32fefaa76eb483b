"""A simulated machine: models, networks, and iterations with a segmentation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from random import Random
from typing import Any

from hvdlite.common.segmentation.cost import (
    MeasuredIteration,
)
from hvdlite.common.segmentation.parsing import by_index, by_size
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.common.segmentation.tuner import Decision, Tuner
from tests.resnet50 import BACKWARD


@dataclass
class Machine:
    """Runs iterations on a clock of its own: the oracle, which knows no model but its own."""

    gradients: Sequence[Gradient]
    compute: Sequence[float]  # seconds of backward until each gradient, since the one before
    latency: float  # seconds
    bandwidth: float  # bytes a second
    knee: float = float("inf")  # bytes of a reduction beyond which bandwidth is a third
    noise: float = 0.0  # relative deviation of every time
    random: Random = field(default_factory=lambda: Random(1))
    drift: float = 0.0  # the same for all of backward together

    def run(self, ends: Sequence[int]) -> MeasuredIteration:
        now, ready = 0.0, []
        slow = max(self.random.gauss(1, self.drift), 0.5) if self.drift else 1.0
        for seconds in self.compute:
            now += seconds * slow * self._jitter()
            ready.append(now)
        backward_end, free, first = now, 0.0, 0
        segments = []
        for end in ends:
            nbytes = sum(each.bytes for each in self.gradients[first : end + 1])
            start = max(free, ready[end])
            more = 2 * max(nbytes - self.knee, 0)
            free = start + (self.latency + (nbytes + more) / self.bandwidth) * self._jitter()
            segments.append((nbytes, start, free))
            first = end + 1
        return MeasuredIteration(tuple(ready), tuple(segments), backward_end, free)

    def tail(self, ends: Sequence[int]) -> float:
        noise, self.noise = self.noise, 0.0
        tail = self.run(ends).tail
        self.noise = noise
        return tail

    def best_tail(self, most_segments: int) -> float:
        """The shortest tail of all segmentations with so many segments."""
        last = len(self.gradients) - 1
        return min(
            self.tail((*cuts, last))
            for segments in range(1, min(most_segments, last + 1) + 1)
            for cuts in combinations(range(last), segments - 1)
        )

    def _jitter(self) -> float:
        return max(self.random.gauss(1, self.noise), 0.1) if self.noise else 1.0


def named(sizes: Sequence[int]) -> list[Gradient]:
    return [Gradient(f"layer{i}.weight", size, "float32") for i, size in enumerate(sizes)]


def coarse_resnet(pieces: int) -> list[Gradient]:
    """ResNet-50 in backward order, neighbours together."""
    bounds = [round(k * len(BACKWARD) / pieces) for k in range(pieces + 1)]
    return named([sum(each.bytes for each in BACKWARD[a:b]) for a, b in pairwise(bounds)])


MODELS = {
    "ResNet-50": (coarse_resnet(24), [0.01] * 24),
    "transformer": (named([8_000_000, *[2_400_000, 1_200_000] * 8, 30_000_000]), [0.004] * 18),
    "big first": (named([60_000_000, *[1_000_000] * 15]), [0.002] + [0.02] * 15),
    "many small": (named([40_000] * 20), [0.0005] * 20),
    "uneven": (named([Random(5).randrange(1000, 9_000_000) for _ in range(16)]),
               [Random(6).random() * 0.03 for _ in range(16)]),
}  # fmt: skip


NETWORKS = {
    "1 Gbit/s": (2e-3, 1.2e8),
    "10 Gbit/s": (2e-4, 1.2e9),
    "memory": (5e-5, 8e9),
    "far away": (5e-2, 1e8),
}


def machine(model: str, network: str, noise: float = 0.0) -> Machine:
    gradients, compute = MODELS[model]
    return Machine(gradients, compute, *NETWORKS[network], noise=noise)


def train(tuner: Tuner, on: Machine, iterations: int) -> list[Decision]:
    decisions = []
    for _ in range(iterations):
        tuner.observe(on.run(tuner.last_indices))
        decision = tuner.decide()
        if decision is not None:
            assert list(decision.last_indices) == tuner.last_indices
            decisions.append(decision)
    return decisions


def obeyed(line: str, gradients: Sequence[Gradient]) -> list[int]:
    """The last indices of the segments that the pasted line makes."""
    call, _, rest = line.partition("([")
    values: list[Any] = json.loads(f"[{rest.rstrip(')')}")
    strategy = {
        "hvd.set_split_strategy_by_size": by_size,
        "hvd.set_split_strategy_by_idx": by_index,
    }
    return strategy[call](values).last_indices(gradients)
