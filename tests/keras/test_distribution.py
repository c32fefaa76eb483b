"""Why parts of Keras models are not sharded: its ModelParallel cuts nothing, but for JAX.

There it cuts over the devices of one process, of which a rank has one.
"""

from __future__ import annotations

import pytest

from hvdlite.keras.framework import LEGACY, keras

pytestmark = pytest.mark.skipif(LEGACY, reason="keras.distribution is of Keras 3")


@pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX cuts over its devices")
def test_model_parallel_leaves_variables_whole() -> None:
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


@pytest.mark.skipif(keras.backend.backend() != "torch", reason="a matter of PyTorch")
def test_keras_has_no_devices_with_pytorch() -> None:
    with pytest.raises((AttributeError, NotImplementedError)):
        keras.distribution.list_devices()
