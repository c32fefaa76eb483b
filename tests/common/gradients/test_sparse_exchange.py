"""The largest elements of a tensor are found, also where a sample narrows the search."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.common.gradients.compressed_exchange import largest


@pytest.mark.parametrize("size", [1, 100, 1 << 14, 50_000])
@pytest.mark.parametrize("ratio", [0.001, 0.1, 0.9, 1.0])
def test_the_largest_are_found(size: int, ratio: float) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    count = int(np.ceil(ratio * size))
    expected = np.sort(np.argsort(-np.abs(values), kind="stable")[:count])
    np.testing.assert_array_equal(largest(values, count), expected)


@pytest.mark.parametrize("period", [1, 61])
def test_a_sample_that_misleads_does_no_harm(period: int) -> None:
    values = np.zeros(50_000, np.float32)
    values[::period] = 1  # The sample sees ones only.
    assert len(np.unique(largest(values, 5_000))) == 5_000
