"""The public names of hvdlite.jax."""

from __future__ import annotations

import hvdlite.jax as hvd
from tests.test_public_api import JAX_FILE, golden, signatures, unexplained


def test_signatures() -> None:
    assert signatures(hvd) == golden(JAX_FILE)


def test_every_argument_is_explained() -> None:
    assert unexplained(hvd.DistributedOptimizer) == []
    # The first are those of `jax.value_and_grad`.
    assert unexplained(hvd.value_and_grad) == ["fun", "argnums", "has_aux"]
