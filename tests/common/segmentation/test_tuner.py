"""`auto`: what it finds on a machine that is simulated, against a search through everything."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.segmentation import saved_results as learned
from hvdlite.common.segmentation.boundaries import split_call
from hvdlite.common.segmentation.cost import (
    CostModel,
    MeasuredIteration,
    ReductionCost,
    fit,
    fit_reductions,
)
from hvdlite.common.segmentation.parsing import by_index, by_size
from hvdlite.common.segmentation.search import MOST_CUT_POINTS, best_cuts, neighbours
from hvdlite.common.segmentation.strategies import MOST_SEGMENTS, Gradient, Size
from hvdlite.common.segmentation.trials import Trials
from hvdlite.common.segmentation.tuner import Decision, Tuner
from tests.resnet50 import BACKWARD

FREEZES_WITHIN = 400  # iterations


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


# -- what is found


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_the_tail_is_within_five_percent_of_the_best(model: str, network: str) -> None:
    on = machine(model, network)
    tuner = Tuner(on.gradients)
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert decisions[-1].frozen
    assert not any(each.frozen for each in decisions[:-1])
    assert on.tail(tuner.last_indices) <= 1.05 * on.best_tail(4)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_the_tail_is_within_ten_percent_of_the_best_on_a_noisy_machine(
    model: str, network: str
) -> None:
    on = machine(model, network, noise=0.03)
    tuner = Tuner(on.gradients)
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert [each.frozen for each in decisions][-1:] == [True]
    # A tail is what is left of two long times: their noise is the measure of what can be seen.
    seen = 0.01 * sum(on.compute)
    assert on.tail(tuner.last_indices) <= 1.1 * on.best_tail(4) + seen


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("compute", "network"), [(0.055, "1 Gbit/s"), (0.01, "10 Gbit/s")])
def test_backward_that_varies_leaves_room_for_late_gradients(
    compute: float, network: str, seed: int
) -> None:
    gradients = coarse_resnet(24)
    on = Machine(gradients, [compute] * 24, *NETWORKS[network], noise=0.1, drift=0.1)
    on.random = Random(seed)
    tuner = frozen(on)
    assert len(tuner.last_indices) <= MOST_SEGMENTS

    def mean_tail(ends: Sequence[int]) -> float:
        on.random = Random(100)
        return float(np.mean([on.run(ends).tail for _ in range(50)]))

    # What is best where nothing varies has no room: its tails are several times as long.
    calm = Machine(gradients, on.compute, *NETWORKS[network])
    tight = frozen(calm).last_indices
    assert mean_tail(tuner.last_indices) < 0.7 * mean_tail(tight)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("model", MODELS)
def test_what_was_tried_teaches_what_to_try_next(model: str, network: str) -> None:
    on = machine(model, network)
    on.knee = sum(each.bytes for each in on.gradients) / 8  # large ones are slower than expected
    tuner = frozen(on)
    assert on.tail(tuner.last_indices) <= 1.05 * on.best_tail(4)


def test_the_first_iteration_of_a_turn_does_not_count() -> None:
    tails = {(9,): [0, 1, 9, 9], (4, 9): [8, 8, 8, 8]}
    trials = Trials(list(tails))
    seen = dict.fromkeys(tails, 0)
    while not trials.finished:
        ends = trials.current
        tail = tails[ends][seen[ends] % 4]
        seen[ends] += 1
        trials.observe(MeasuredIteration((1.0,) * 10, ((1, 1.0, 1.0 + tail),), 1.0, 1.0 + tail))
    assert trials.ranking(len) == [(4, 9), (9,)]


@pytest.mark.parametrize(("noise", "turns"), [(0.0, 3), (0.2, 6)])
def test_what_noise_does_not_let_tell_apart_has_more_turns(noise: float, turns: int) -> None:
    random = Random(2)
    trials = Trials([(9,), (4, 9)])
    seen = 0
    while not trials.finished:
        seen += trials.current == (4, 9)
        tail = (1.0 if trials.current == (9,) else 1.1) * random.gauss(1, noise)
        trials.observe(MeasuredIteration((1.0,) * 10, ((1, 1.0, 1.0 + tail),), 1.0, 1.0 + tail))
    assert seen in range(4 * 3, 4 * turns + 1)
    assert (seen > 4 * 3) == (turns > 3)


def test_the_first_iterations_have_hccls_split_and_one_segment_is_tried() -> None:
    on = machine("ResNet-50", "10 Gbit/s")
    tuner = Tuner(on.gradients)
    assert tuner.decide() is None
    assert tuner.last_indices == Size().last_indices(on.gradients)
    tried = [each.last_indices for each in train(tuner, on, FREEZES_WITHIN)]
    assert (len(on.gradients) - 1,) in tried
    assert tuple(Size().last_indices(on.gradients)) in tried


def test_one_gradient_needs_no_tuning() -> None:
    tuner = Tuner(named([100]))
    assert tuner.decide() == Decision((0,), True)


def test_iterations_with_gradients_missing_do_not_count() -> None:
    on = machine("ResNet-50", "10 Gbit/s")
    tuner = Tuner(on.gradients)
    whole = on.run(tuner.last_indices)
    for _ in range(FREEZES_WITHIN):
        tuner.observe(whole._replace(ready=whole.ready[1:]))
        tuner.observe(whole._replace(ready=(float("inf"), *whole.ready[1:])))
        tuner.observe(whole._replace(segments=()))
    assert tuner.decide() is None


# -- what changes, and what does not


def frozen(on: Machine) -> Tuner:
    tuner = Tuner(on.gradients)
    assert train(tuner, on, FREEZES_WITHIN)[-1].frozen
    return tuner


def test_nothing_changes_where_nothing_changes() -> None:
    on = machine("ResNet-50", "1 Gbit/s", noise=0.05)
    tuner = frozen(on)
    assert train(tuner, on, 2000) == []


@pytest.mark.parametrize("calm", range(0, 20, 3))
def test_one_bad_moment_changes_nothing(calm: int) -> None:
    on = machine("ResNet-50", "1 Gbit/s")
    tuner = frozen(on)
    decisions = train(tuner, on, 40 + calm)
    on.bandwidth /= 10
    decisions += train(tuner, on, 15)
    on.bandwidth *= 10
    assert decisions + train(tuner, on, 200) == []


@pytest.mark.parametrize("factor", [1 / 8, 8])
def test_another_speed_of_the_network_leads_to_other_segments(factor: float) -> None:
    on = machine("ResNet-50", "1 Gbit/s", noise=0.01)
    tuner = frozen(on)
    on.bandwidth *= factor
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert not decisions[0].frozen
    assert decisions[-1].frozen
    on.noise = 0
    assert on.tail(tuner.last_indices) <= 1.1 * on.best_tail(4)


def test_another_speed_of_backward_is_noticed() -> None:
    on = machine("ResNet-50", "10 Gbit/s")
    tuner = frozen(on)
    on.compute = [4 * seconds for seconds in on.compute]
    decisions = train(tuner, on, FREEZES_WITHIN)
    assert decisions[-1].frozen
    assert on.tail(tuner.last_indices) <= 1.05 * on.best_tail(4)


def test_what_is_known_is_used_at_once_and_not_changed() -> None:
    on = machine("ResNet-50", "1 Gbit/s", noise=0.05)
    tuner = Tuner(on.gradients, saved=[3, 23])
    assert tuner.decide() == Decision((3, 23), True)
    assert train(tuner, on, 500) == []
    assert tuner.last_indices == [3, 23]


@pytest.mark.parametrize("known", [[], [3], [5, 3, 23], [-1, 23], [3, 3, 23], [3, 24]])
def test_ends_of_another_model_are_refused(known: list[int]) -> None:
    with pytest.raises(ValueError, match="24 gradients"):
        Tuner(coarse_resnet(24), saved=known)


# -- its parts

TIMES = st.floats(0, 1)
CASES = st.lists(st.tuples(st.integers(0, 10**8), TIMES), min_size=1, max_size=9)


@given(CASES, st.floats(0, 0.1), st.floats(1e6, 1e10))
def test_the_search_finds_what_a_search_through_everything_finds(
    case: list[tuple[int, float]], latency: float, bandwidth: float
) -> None:
    gradients = named([size for size, _ in case])
    on = Machine(gradients, [seconds for _, seconds in case], latency, bandwidth)
    whole = on.run([len(case) - 1])
    sizes = [each.bytes for each in gradients]
    cost = ReductionCost(latency, 1 / bandwidth)
    model = CostModel(whole.ready, sizes, whole.backward_end, cost)
    for segments, proposal in enumerate(best_cuts(model, 4), start=1):
        assert len(proposal.last_indices) == segments
        assert proposal.tail == pytest.approx(on.tail(proposal.last_indices), abs=1e-9)
        assert min(each.tail for each in best_cuts(model, segments)) == pytest.approx(
            on.best_tail(segments), abs=1e-9
        )


@given(CASES, st.floats(0, 0.1), st.data())
def test_neighbours_are_segmentations(
    case: list[tuple[int, float]], latency: float, data: st.DataObject
) -> None:
    ready = sorted(seconds for _, seconds in case)
    cost = ReductionCost(latency, 1e-9)
    model = CostModel(ready, [size for size, _ in case], ready[-1], cost)
    last = len(case) - 1
    ends = sorted({last, *data.draw(st.lists(st.integers(0, last), max_size=4))})
    for near in neighbours(model, ends):
        assert list(near) == sorted(set(near))
        assert near[0] >= 0 and near[-1] == last


def test_the_three_rules() -> None:
    ready = [float(k + 1) for k in range(10)]
    equal = [100] * 10

    def near(ends: list[int], seconds_per_byte: float) -> list[tuple[int, ...]]:
        return neighbours(
            CostModel(ready, equal, 10.0, ReductionCost(0.01, seconds_per_byte)), ends
        )

    assert (7, 9) in near([4, 9], 0.005)  # the last one is long: 50, 50 becomes 80, 20
    assert (7, 9) in near([8, 9], 0.01)  # the first one starts late: 90, 10 becomes 80, 20
    assert (7, 9) in near([9], 0.001)  # backward has room: 100 becomes 80, 20
    assert (5, 7, 9) in near([7, 9], 0.0045)  # backward has room: 80, 20 becomes 60, 20, 20
    assert near([0, 9], 1.0) == []  # communication is far longer than backward


def test_a_search_among_very_many_gradients() -> None:
    gradients = 3 * MOST_CUT_POINTS
    ready = [1e-4 * k for k in range(gradients)]
    model = CostModel(ready, [1000] * gradients, 0.6, ReductionCost(1e-3, 1e-7))
    for segments, proposal in enumerate(best_cuts(model, 3), start=1):
        assert len(proposal.last_indices) == segments
        assert proposal.last_indices[-1] == gradients - 1
        assert proposal.tail == pytest.approx(model.tail(proposal.last_indices))


def test_the_cost_of_a_reduction_survives_outliers() -> None:
    random = Random(3)
    reductions = [
        (nbytes, (1e-3 + nbytes / 1e8) * random.gauss(1, 0.02) * (20 if k % 7 == 0 else 1))
        for k in range(200)
        for nbytes in [(1 << 20) * (1 + k % 5)]
    ]
    latency, seconds_per_byte, _ = fit_reductions(reductions)
    assert seconds_per_byte == pytest.approx(1e-8, rel=0.1)
    assert latency == pytest.approx(1e-3, abs=1.5e-3)


@given(st.lists(st.tuples(st.integers(0, 10**9), st.floats(0, 10)), min_size=1))
def test_no_cost_is_negative_or_infinite(reductions: list[tuple[int, float]]) -> None:
    cost = fit_reductions(reductions)
    assert 0 <= cost.latency < 1000
    assert 0 <= cost.seconds_per_byte < 1000
    seconds = cost.seconds(np.array([0.0, 1.0, 1e3, 1e9]))
    assert (seconds >= 0).all() and (seconds < 1e15).all()


def test_segments_of_one_size_have_most_of_their_time_by_bytes() -> None:
    latency, seconds_per_byte, _ = fit_reductions([(1000, 0.5), (1000, 0.7), (1000, 0.6)])
    assert 0 < latency < 0.01
    assert latency + 1000 * seconds_per_byte == pytest.approx(0.6)


def test_the_model_predicts_what_it_was_fitted_from() -> None:
    on = machine("ResNet-50", "1 Gbit/s")
    sizes = [each.bytes for each in on.gradients]
    model = fit([on.run([3, 9, 23])], sizes)
    for ends in ([23], [11, 23], [1, 2, 20, 23]):
        assert model.tail(ends) == pytest.approx(on.tail(ends))


# -- what is said, and what is kept


def obeyed(line: str, gradients: Sequence[Gradient]) -> list[int]:
    """The ends that the pasted line makes."""
    call, _, rest = line.partition("([")
    values: list[Any] = json.loads(f"[{rest.rstrip(')')}")
    strategy = {
        "hvd.set_split_strategy_by_size": by_size,
        "hvd.set_split_strategy_by_idx": by_index,
    }
    return strategy[call](values).last_indices(gradients)


@given(st.lists(st.integers(0, 10**9), min_size=1, max_size=40), st.data())
@settings(max_examples=200)
def test_the_line_makes_the_same_segments_again(sizes: list[int], data: st.DataObject) -> None:
    gradients = named(sizes)
    last = len(sizes) - 1
    cuts = data.draw(st.sets(st.integers(0, last), max_size=7))
    ends = sorted({*cuts, last})
    assert obeyed(split_call(ends, gradients), gradients) == ends


def test_the_line_has_no_more_digits_than_it_needs() -> None:
    assert split_call([160], BACKWARD) == "hvd.set_split_strategy_by_size([100])"
    assert (
        split_call([28, 60, 160], BACKWARD) == "hvd.set_split_strategy_by_size([64.5, 15.2, 20.3])"
    )


def test_gradients_that_no_percentage_tells_apart_are_named_by_index() -> None:
    gradients = named([0, 0, 0, 100])
    assert split_call([1, 3], gradients) == "hvd.set_split_strategy_by_idx([1, 3])"


def test_the_line_says_what_is_in_force() -> None:
    on = machine("transformer", "1 Gbit/s")
    tuner = frozen(on)
    assert obeyed(tuner.call, on.gradients) == tuner.last_indices


def test_a_file_goes_round(tmp_path: Path) -> None:
    path = str(tmp_path / "learned.json")
    gradients = coarse_resnet(24)
    assert learned.load(path, gradients) is None  # not there: as good as empty
    learned.save(path, [3, 9, 23], gradients)
    learned.save(path, [4, 9, 23], gradients)
    assert learned.load(path, gradients) == [4, 9, 23]
    assert [each.name for each in tmp_path.iterdir()] == ["learned.json"]


def test_a_file_keeps_what_several_optimizers_have_learned(tmp_path: Path) -> None:
    path = str(tmp_path / "learned.json")
    models = [coarse_resnet(pieces) for pieces in range(4, 24)]
    for gradients in models:
        learned.save(path, [1, len(gradients) - 1], gradients)
    learned.save(path, [2, 22], models[-1])
    assert learned.load(path, models[-1]) == [2, 22]
    assert learned.load(path, models[-2]) == [1, 21]
    assert learned.load(path, models[0]) is None  # long ago


@pytest.mark.parametrize(
    "other",
    [coarse_resnet(23), coarse_resnet(24)[::-1], [*coarse_resnet(24)[:-1], Gradient("x", 1, "a")]],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, other: list[Gradient]
) -> None:
    path = str(tmp_path / "learned.json")
    learned.save(path, [3, 23], coarse_resnet(24))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert learned.load(path, other) is None
    assert path in caplog.text
    assert "another model" in caplog.text
    assert "tuning begins anew" in caplog.text


def with_ends(content: dict[str, Any], ends: list[Any]) -> str:
    (key, model), *_ = content["models"].items()
    return json.dumps({**content, "models": {key: {**model, "ends": ends}}})


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: "no json", "Expecting value"),
        (lambda content: "[]", "no segmentation"),
        (lambda content: json.dumps({**content, "version": 7}), "version 7"),
        (lambda content: json.dumps({**content, "models": [3]}), "[3] are none"),
        (lambda content: with_ends(content, [3]), "[3] are no ends"),
        (lambda content: with_ends(content, [3.5, 23]), "whole numbers"),
    ],
)
def test_a_damaged_file_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, words: str
) -> None:
    path = tmp_path / "learned.json"
    gradients = coarse_resnet(24)
    learned.save(str(path), [3, 23], gradients)
    path.write_text(change(json.loads(path.read_text())))
    with caplog.at_level(logging.WARNING, "hvdlite"):
        assert learned.load(str(path), gradients) is None
    assert words in caplog.text


def test_a_file_that_cannot_be_written_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "nowhere" / "learned.json")
    with caplog.at_level(logging.WARNING, "hvdlite"):
        learned.save(path, [23], coarse_resnet(24))
    assert path in caplog.text
