"""Halos of numpy arrays."""

from __future__ import annotations

import numpy as np
import pytest

import hvdlite.numpy as hvd
from tests.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_edges(size: int) -> None:
    whole = np.arange(2 * 3 * size).reshape(2, 3 * size)
    padded = np.pad(whole, ((0, 0), (1, 2)), constant_values=-1)

    def main(rank: int) -> None:
        found = hvd.halo(whole[:, 3 * rank : 3 * rank + 3], 1, 1, 2, fill=-1)
        np.testing.assert_array_equal(found, padded[:, 3 * rank : 3 * rank + 6])

    run_ranks(size, main)
