"""Checkpoints of TensorFlow and Keras: variables, models, optimizers, parts of variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import hvdlite.keras as keras_hvd
import hvdlite.numpy as numpy_hvd
import hvdlite.tf as hvd
from tests.ranks import run_ranks

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

Layout = hvd.checkpoint.Layout


def test_variables_of_four_ranks_become_those_of_two(tmp_path: Path) -> None:
    full = np.arange(64, dtype=np.float32).reshape(8, 8)
    rows, columns = Layout([4], [0, -1]), Layout([2], [-1, 0])

    def write(rank: int) -> None:
        part = tf.Variable(full[rank * 2 : rank * 2 + 2])
        state = {"w": part, "b": tf.Variable(tf.ones(3, tf.bfloat16)), "constant": tf.range(3)}
        hvd.checkpoint.save(tmp_path / "it", {**state, "step": 4}, {"w": rows})

    def read(rank: int) -> None:
        state: dict[str, Any] = {
            "w": tf.Variable(tf.zeros((8, 4))),
            "b": tf.Variable(tf.zeros(3, tf.bfloat16)),
            "constant": tf.zeros(3, tf.int32),
            "step": 0,
        }
        kept = state["w"]
        hvd.checkpoint.load(tmp_path / "it", state, {"w": columns})
        assert state["w"] is kept
        assert np.array_equal(kept.numpy(), full[:, rank * 4 : rank * 4 + 4])
        assert np.array_equal(state["b"].numpy(), np.ones(3))
        assert state["constant"].numpy().tolist() == [0, 1, 2]
        assert state["step"] == 4

    run_ranks(4, write)
    run_ranks(2, read)


def network() -> Any:
    return keras.Sequential(
        [
            keras.layers.Input((4,)),
            keras.layers.Dense(6, activation="relu", name="first"),
            keras.layers.Dropout(0.5, name="dropout"),
            keras.layers.BatchNormalization(name="norm"),
            keras.layers.Dense(2, name="last"),
        ]
    )


def step(model: Any, optimizer: Any) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(tf.ones((3, 4)), training=False) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))


@pytest.mark.parametrize("hvd", [hvd, keras_hvd], ids=["tf", "keras"])
def test_a_model_and_its_optimizer_go_on(tmp_path: Path, hvd: Any) -> None:
    """The oracle trains on without a checkpoint."""
    first, second = (
        {"model": network(), "optimizer": keras.optimizers.Adam(0.1), "epoch": epoch}
        for epoch in (7, 0)
    )
    step(first["model"], first["optimizer"])
    hvd.checkpoint.save(tmp_path / "it", first)
    with pytest.raises(ValueError, match=r"Adam 'adam.*' has no variables yet: call build"):
        hvd.checkpoint.load(tmp_path / "it", second)
    second["optimizer"].build(second["model"].trainable_variables)
    hvd.checkpoint.load(tmp_path / "it", second)
    assert second["epoch"] == 7
    for each in (first, second):
        step(each["model"], each["optimizer"])
    for here, there in zip(first["model"].weights, second["model"].weights, strict=True):
        assert np.array_equal(here.numpy(), there.numpy()), here.path
    arrays = {"model": {"first/kernel": np.zeros((4, 6), np.float32)}}
    numpy_hvd.checkpoint.load(tmp_path / "it", arrays)
    assert not np.array_equal(arrays["model"]["first/kernel"], np.zeros((4, 6)))


def test_layers_that_keras_has_counted_further(tmp_path: Path) -> None:
    """A model that is built once more, as in a notebook, has the same layers by other names."""

    def build(layers: int) -> Any:
        dense = [keras.layers.Dense(4) for _ in range(layers)]
        model = keras.Sequential([keras.layers.Input((4,)), *dense])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
        return {"model": model, "optimizer": optimizer}

    saved, other = build(11), build(11)  # Of their names, 10 comes before 9.
    step(saved["model"], saved["optimizer"])
    hvd.checkpoint.save(tmp_path / "it", saved)
    hvd.checkpoint.load(tmp_path / "it", other)
    for name in saved:
        for here, there in zip(saved[name].variables, other[name].variables, strict=True):
            assert np.array_equal(here.numpy(), there.numpy()), here.path
    with pytest.raises(KeyError, match=r"the checkpoint has no 'model\.dense_"):
        hvd.checkpoint.load(tmp_path / "it", build(12))


def test_inference_is_whole(tmp_path: Path) -> None:
    model = network()
    layouts = keras_hvd.checkpoint.infer_layout(model, np.ones((3, 4)))
    assert layouts["first/kernel"] == Layout([1], [-1, -1])
    assert not [name for name in layouts if "seed" in name]
    keras_hvd.checkpoint.save(tmp_path / "it", model)
    other = network()
    (file,) = (tmp_path / "it").glob("*.safetensors")
    keras_hvd.checkpoint.load_distributed_checkpoint(other, [str(file)])
    assert np.array_equal(model(np.ones((3, 4))), other(np.ones((3, 4))))


def test_values_are_not_read_while_a_graph_is_built(tmp_path: Path) -> None:
    variable = tf.Variable(1.0)

    @tf.function(autograph=False)  # type: ignore[untyped-decorator]
    def save() -> None:
        hvd.checkpoint.save(tmp_path / "it", {"w": variable})

    with pytest.raises(ValueError, match="outside of a"):
        save()
