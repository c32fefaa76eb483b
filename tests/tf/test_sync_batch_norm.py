"""SyncBatchNormalization on parts of a batch is BatchNormalization on the whole batch."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.tf.sync_batch_norm import SynchronizedOfKeras2
from tests.ranks import run_ranks

Array = np.ndarray[Any, Any]
CHANNELS = 3
ROWS = [5, 2, 0]  # of the ranks' batches


def layers(keras: str) -> tuple[Any, Any]:
    """SyncBatchNormalization as it is with this Keras, and the layer that is the oracle."""
    if keras == "keras 3":
        return hvd.SyncBatchNormalization, tf.keras.layers.BatchNormalization
    plain = pytest.importorskip("tf_keras").layers.BatchNormalization
    not_fused = functools.partial(plain, fused=False)  # the fused kernel has other formulas
    return type("SyncBatchNormalization", (SynchronizedOfKeras2, plain), {}), not_fused


def whole(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32") -> Array:
    values = np.random.default_rng(seed).normal(3, 2, (sum(ROWS), *shape))
    return values.astype(dtype)


def part(rank: int) -> slice:
    start = sum(ROWS[:rank])
    return slice(start, start + ROWS[rank])


def run(layer: Any, mode: str, inputs: list[Array], upstream: list[Array], masks: Any) -> list[Any]:
    """Outputs and gradients, batch after batch, and the moving statistics."""
    layer.build((None, *inputs[0].shape[1:]))
    for weight, start in zip(layer.trainable_weights, (2.0, 1.0), strict=False):
        weight.assign(start + tf.range(CHANNELS, dtype=weight.dtype))

    def step(x: Any, dy: Any, mask: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            output = layer(x, training=True, mask=mask)
        return [output, *tape.gradient(output, [x, *layer.trainable_weights], dy)]

    function = tf.function(step) if mode == "graph" else step
    results = [
        function(tf.constant(x), tf.constant(dy), None if mask is None else tf.constant(mask))
        for x, dy, mask in zip(inputs, upstream, masks, strict=True)
    ]
    plain = [[each.numpy() for each in result] for result in results]
    return [*plain, [weight.numpy() for weight in layer.non_trainable_weights]]


CASES: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((CHANNELS,), {}, "float32"),
    ((2, 4, CHANNELS), {"scale": False, "epsilon": 0.1}, "float32"),
    ((CHANNELS, 2), {"axis": 1, "momentum": 0.5, "center": False}, "float64"),
    ((4, CHANNELS), {"dtype": "mixed_bfloat16"}, "float32"),
]


@pytest.mark.parametrize(
    ("keras", "mode"), [("keras 3", "eager"), ("keras 3", "graph"), ("keras 2", "graph")]
)
@pytest.mark.parametrize(("shape", "options", "dtype"), CASES, ids=str)
def test_forward_and_backward(
    keras: str, mode: str, shape: tuple[int, ...], options: dict[str, Any], dtype: str
) -> None:
    synchronized, reference = layers(keras)
    options = {"dtype": dtype, **options}
    mixed = options["dtype"] == "mixed_bfloat16"
    inputs, upstream = ([whole(shape, seed + n, dtype) for n in range(2)] for seed in (0, 10))
    if mixed:
        upstream = [tf.cast(each, tf.bfloat16).numpy() for each in upstream]
    expected = run(reference(**options), "eager", inputs, upstream, [None, None])

    def main(rank: int) -> list[Any]:
        mine, theirs = ([each[part(rank)] for each in whole] for whole in (inputs, upstream))
        return run(synchronized(**options), mode, mine, theirs, [None, None])

    results = run_ranks(len(ROWS), main)
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if mixed else {"rtol": 1e-4, "atol": 1e-4}
    for batch in range(2):
        for rank, result in enumerate(results):
            for own, wanted in zip(result[batch][:2], expected[batch][:2], strict=True):
                np.testing.assert_allclose(
                    own.astype(np.float64), wanted[part(rank)].astype(np.float64), **tolerance
                )
        for index, wanted in enumerate(expected[batch][2:], start=2):
            total = sum(result[batch][index] for result in results)
            np.testing.assert_allclose(total, wanted, **tolerance)
    for result in results:
        for own, wanted in zip(result[-1], expected[-1], strict=True):
            np.testing.assert_allclose(own, wanted, **tolerance)


def test_only_what_the_mask_leaves() -> None:
    inputs, upstream = whole((4, CHANNELS)), whole((4, CHANNELS), 1)
    mask = np.arange(sum(ROWS))[:, None] > np.array(
        [0, 2, 5, 9]
    )  # nothing is left of rank 1's rows
    mask[ROWS[0] :] = False
    layer = tf.keras.layers.BatchNormalization()
    expected = run(layer, "eager", [inputs], [upstream], [mask])

    def main(rank: int) -> list[Any]:
        own = part(rank)
        layer = hvd.SyncBatchNormalization()
        return run(layer, "graph", [inputs[own]], [upstream[own]], [mask[own]])

    results = run_ranks(len(ROWS), main)
    for rank, result in enumerate(results):
        for each, wanted in zip(result[0][:2], expected[0][:2], strict=True):
            np.testing.assert_allclose(each, wanted[part(rank)], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(result[1], expected[1], rtol=1e-5)


def test_evaluation_and_one_rank_are_plain_batch_normalization() -> None:
    batch = whole((CHANNELS,))
    plain = tf.keras.layers.BatchNormalization()
    expected = [plain(batch, training=training) for training in (True, False)]

    def main(rank: int) -> None:
        layer = hvd.SyncBatchNormalization()
        results = [layer(batch, training=training) for training in (True, False)]
        np.testing.assert_allclose(results, expected, rtol=1e-6)

    run_ranks(1, main)


def test_a_process_set_is_one_batch_also_after_loading(tmp_path: Path) -> None:
    batch = whole((CHANNELS,))
    expected = tf.keras.layers.BatchNormalization()(batch, training=True)

    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        model = tf.keras.Sequential([hvd.SyncBatchNormalization(process_set=pair)])
        model.build((None, CHANNELS))
        assert not model.layers[0].supports_jit
        path = tmp_path / f"{rank}.keras"
        model.save(path)
        loaded = tf.keras.models.load_model(path)
        if rank != 1:
            own = slice(0, 3) if rank == 0 else slice(3, None)
            for each in (model, loaded):
                result = each(batch[own], training=True)
                np.testing.assert_allclose(result, expected[own], rtol=1e-4, atol=1e-5)

    run_ranks(3, main)


def test_misuse() -> None:
    def main(rank: int) -> None:
        for fused in (True, None):
            with pytest.raises(ValueError, match="does not support fused=True"):
                hvd.SyncBatchNormalization(fused=fused)
        with pytest.raises(ValueError, match=r"no process set with the ranks \[0\] is registered"):
            hvd.SyncBatchNormalization(process_set=[0])

    run_ranks(1, main)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_a_penalty_on_gradients(mode: str) -> None:
    inputs = whole((CHANNELS,))

    def penalty_gradient(layer: Any, x: Any) -> Array:
        def compute(x: Any) -> Any:
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(layer(x, training=True) ** 3)
                penalty = tf.reduce_sum(inner.gradient(loss, x) ** 2)
            return outer.gradient(penalty, x)

        layer.build((None, CHANNELS))
        result: Array = (tf.function(compute) if mode == "graph" else compute)(x).numpy()
        return result

    expected = penalty_gradient(tf.keras.layers.BatchNormalization(), tf.constant(inputs))

    def main(rank: int) -> None:
        result = penalty_gradient(hvd.SyncBatchNormalization(), tf.constant(inputs[part(rank)]))
        np.testing.assert_allclose(result, expected[part(rank)], 1e-3, 1e-3)

    run_ranks(len(ROWS), main)
