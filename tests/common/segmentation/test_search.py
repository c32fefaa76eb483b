"""The search for cuts against a search through everything."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.segmentation.cost import (
    CostModel,
    ReductionCost,
    fit,
    fit_reductions,
)
from hvdlite.common.segmentation.search import MOST_CUT_POINTS, best_cuts, neighbours
from tests.common.segmentation.machine import Machine, machine, named

TIMES = st.floats(0, 1)


CASES = st.lists(st.tuples(st.integers(0, 10**8), TIMES), min_size=1, max_size=9)


@given(CASES, st.floats(0, 0.1), st.floats(1e6, 1e10))
@pytest.mark.thorough
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
