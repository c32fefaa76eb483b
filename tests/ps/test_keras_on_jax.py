"""Keras 3 on JAX, whose steps servers make out of compiled programs, in real processes."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ps.processes import cluster
from tests.ps.scripts.keras_fit import main
from tests.ps.sites import Site

pytest.importorskip("jax")
pytest.importorskip("keras")
VARIABLES = {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}


def test_a_fit_on_jax_is_that_of_one_process(site: Site) -> None:
    """Workers compare with one process themselves."""
    with cluster(site, 2, 2, main, **VARIABLES) as job:
        assert not job.wait_for_all()
    one, other = (np.load(site.folder / f"worker{number}.npz") for number in range(2))
    assert all((one[name] == other[name]).all() for name in one.files) and len(one.files) == 4
