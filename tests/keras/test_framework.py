"""Which Keras is in use, and what is said about those that hvdlite does not know."""

from __future__ import annotations

import pytest

import hvdlite.keras as hvd
from hvdlite.keras import framework
from hvdlite.keras.framework import keras
from tests.keras.training import sgd
from tests.ranks import run_ranks


@pytest.fixture
def numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keras says that its backend is NumPy."""
    monkeypatch.setattr(keras.backend, "backend", lambda: "numpy")
    framework.adapter.cache_clear()


@pytest.mark.usefixtures("numpy")
def test_another_backend() -> None:
    says = r"backends jax, tensorflow and torch, and this is numpy: set KERAS_BACKEND to one"

    def wrap(rank: int) -> None:
        optimizer = sgd()
        with pytest.raises(NotImplementedError, match=says):
            hvd.DistributedOptimizer(optimizer)
        assert type(optimizer) is type(sgd())
        with pytest.raises(NotImplementedError, match=says):
            hvd.allreduce(1.0)
        with pytest.raises(NotImplementedError, match=says):
            _ = hvd.Compression

    run_ranks(1, wrap)


def test_no_other_names() -> None:
    with pytest.raises(AttributeError, match="elastique"):
        _ = hvd.elastique
