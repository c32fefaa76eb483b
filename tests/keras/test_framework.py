"""Which Keras is in use, and what is said about those that hvdlite does not know."""

from __future__ import annotations

import pytest

import hvdlite.keras as hvd
from hvdlite.keras import framework
from hvdlite.keras.framework import LEGACY, keras
from tests.keras.training import BACKEND, sgd
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


@pytest.mark.skipif(LEGACY, reason="keras.distribution is of Keras 3")
@pytest.mark.skipif(BACKEND == "jax", reason="JAX cuts over its devices, of which a rank has one")
def test_model_parallel_leaves_variables_whole() -> None:
    """So parts of models are not sharded."""
    distribution = keras.distribution
    mesh = distribution.DeviceMesh((1, 2), ("batch", "model"), devices=["cpu:0", "cpu:1"])
    layouts = distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    with distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch").scope():
        layer = keras.layers.Dense(4)
        layer.build((None, 6))
    assert tuple(layer.kernel.shape) == tuple(layer.kernel.value.shape) == (6, 4)
    kind = type(layer.kernel.value).__name__
    assert kind in ("ResourceVariable", "Parameter"), kind


@pytest.mark.skipif(BACKEND != "torch", reason="a matter of PyTorch")
def test_keras_has_no_devices_with_pytorch() -> None:
    with pytest.raises((AttributeError, NotImplementedError)):
        keras.distribution.list_devices()
