"""The cost model and its fit."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdlite.common.segmentation.cost import (
    fit,
    fit_reductions,
)
from tests.common.segmentation.machine import machine


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
