"""Keras 3 on PyTorch, whose steps servers make, in real processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ps.processes import cluster
from tests.ps.scripts.keras_fit import main
from tests.ps.sites import Site

pytest.importorskip("keras")


def test_a_fit_on_pytorch_is_that_of_one_process(site: Site) -> None:
    """Workers compare with one process themselves."""
    variables = {"KERAS_BACKEND": "torch", "OMP_NUM_THREADS": "1"}
    with cluster(site, 2, 2, main, **variables) as job:
        assert not job.wait_for_all()
    one, other = (np.load(site.folder / f"worker{number}.npz") for number in range(2))
    assert all((one[name] == other[name]).all() for name in one.files) and len(one.files) == 4
