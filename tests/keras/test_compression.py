"""Compressors with error feedback in Keras, eagerly and in graphs, beside their models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.common.gradients.compressed_bucket import FeedbackState
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.tensors.compression import FeedbackCompressor
from hvdlite.keras.framework import LEGACY, keras
from tests.compressors import (
    COMPRESSORS,
    BlockModel,
    Model,
    PowerSGDModel,
    SignModel,
    TopKModel,
    every_compressor,
)
from tests.keras.training import (
    apply_gradients,
    assert_same,
    batches_of,
    fit,
    make_model,
    numpy_of,
    tensor,
    variable,
    wrapped,
)
from tests.ranks import run_ranks

SHAPE = (24, 40)


def gradient(rank: int, step: int) -> Any:
    return np.random.default_rng([rank, step]).standard_normal(SHAPE).astype(np.float32)


def model_of(compressor: FeedbackCompressor, name: str, ranks: int) -> Model:
    factor = FeedbackState(compressor, global_process_set).factor(name, (SHAPE[1], 2))
    models = [
        BlockModel(ranks, SHAPE, 16),
        PowerSGDModel(ranks, SHAPE, factor, 0),
        TopKModel(ranks, SHAPE, 0.05, 1),
        SignModel(ranks, SHAPE, 32, 1),
    ]
    return models[COMPRESSORS.index(compressor)]


def distributed(compressor: Any, **options: Any) -> Any:
    optimizer = keras.optimizers.SGD(1.0)
    return hvd.DistributedOptimizer(optimizer, compression=compressor, **options)


@every_compressor
def test_every_step_is_that_of_the_model(compressor: FeedbackCompressor) -> None:
    steps, ranks = 4, 2

    def main(rank: int) -> Any:
        weights, optimizer = variable(np.zeros(SHAPE)), distributed(compressor)
        values = []
        for step in range(steps):
            optimizer.apply_gradients([(tensor(gradient(rank, step)), weights)])
            values.append(numpy_of([weights])[0])
        return values, [*optimizer.compression_state()["steps"]]

    results = run_ranks(ranks, main)
    (name,) = results[0][1]
    model = model_of(compressor, name, ranks)
    expected = np.zeros(SHAPE)
    for step in range(steps):
        expected = expected - model.step([gradient(rank, step) for rank in range(ranks)]) / ranks
        for values, _ in results:
            np.testing.assert_allclose(values[step], expected, atol=5e-5)


@every_compressor
def test_fit_goes_on_from_the_state_of_each_rank(compressor: FeedbackCompressor) -> None:
    """In graphs, where Keras makes them. The optimizer of the state goes on, too."""

    def plain() -> Any:
        return keras.optimizers.SGD(0.1)

    def main(rank: int) -> Any:
        model = make_model()
        optimizer = wrapped(plain, compression=compressor)()
        fit(model, optimizer, rank, 2)
        saved, weights = optimizer.compression_state(), model.get_weights()
        new = wrapped(plain, compression=compressor)()
        new.load_compression_state(saved)
        again = make_model()
        again.set_weights(weights)
        one = fit(again, new, rank, 2)
        model.fit(**batches_of(rank, 2), epochs=2, verbose=0)
        assert_same([one, numpy_of(model.get_weights())])
        return [*numpy_of(weights), *one]

    assert_same(run_ranks(2, main))


with_a_scaler = pytest.mark.parametrize(
    ("compressor", "scaled"), [*((each, False) for each in COMPRESSORS), (COMPRESSORS[2], True)]
)
Kept = tuple[Callable[[], object], Callable[[], object]]


def goes_on_alike(
    compressor: FeedbackCompressor, scaled: bool, keep: Callable[[Any, Any], Kept]
) -> None:
    """Make steps again from where the first function of ``keep(model, optimizer)`` has saved.

    A loss scaler may be around the optimizer, as ``compile()`` has it.
    """
    if scaled and LEGACY:
        pytest.skip("Keras 3 has a scaler that takes gradients as they are")

    def main(rank: int) -> Any:
        model = keras.Sequential(
            [keras.Input((24,)), keras.layers.Dense(40, kernel_initializer="zeros")]
        )
        optimizer = distributed(compressor)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        optimizer.build(model.trainable_variables)
        save, restore = keep(model, optimizer)

        def steps(first: int) -> list[Any]:
            for step in range(first, first + 2):
                gradients = [tensor(gradient(rank, step)), tensor(gradient(rank, step)[0])]
                pairs = list(zip(gradients, model.trainable_variables, strict=True))
                apply_gradients(optimizer, pairs)
            return numpy_of(model.trainable_variables)

        steps(0)
        save()
        once = steps(2)
        restore()
        return [*once, *steps(2)]

    for result in run_ranks(2, main):
        for once, again in zip(result[:2], result[2:], strict=True):
            np.testing.assert_array_equal(once, again)


@with_a_scaler
def test_a_restored_commit_has_what_was_not_sent(
    compressor: FeedbackCompressor, scaled: bool
) -> None:
    def keep(model: Any, optimizer: Any) -> Kept:
        state = hvd.elastic.KerasState(model, optimizer, step=0)
        return state.save, state.restore

    goes_on_alike(compressor, scaled, keep)


@with_a_scaler
def test_a_checkpoint_has_what_was_not_sent(
    compressor: FeedbackCompressor, scaled: bool, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

    def keep(model: Any, optimizer: Any) -> Kept:
        state, folder = {"model": model, "optimizer": optimizer}, tmp_path / "it"
        return (
            lambda: hvd.checkpoint.save(folder, state),
            lambda: hvd.checkpoint.load(folder, state),
        )

    goes_on_alike(compressor, scaled, keep)


@every_compressor
def test_what_is_sent_and_what_is_left_are_all_gradients(compressor: FeedbackCompressor) -> None:
    steps = 3

    def main(rank: int) -> Any:
        weights, optimizer = variable(np.zeros(SHAPE)), distributed(compressor, op=hvd.Sum)
        for step in range(steps):
            optimizer.apply_gradients([(tensor(gradient(rank, step)), weights)])
        residuals = optimizer.compression_state()["residuals"]
        left = [each.reshape(SHAPE) for each in residuals.values()]
        return -numpy_of([weights])[0], sum(left)

    results = run_ranks(3, main)
    whole = sum(gradient(rank, step) for rank in range(3) for step in range(steps))
    np.testing.assert_allclose(results[0][0] + sum(left for _, left in results), whole, atol=1e-4)


@pytest.mark.parametrize("other", [hvd.Compression.none, COMPRESSORS[0]])
def test_ranks_with_different_compressors_are_told_so(other: Any) -> None:
    def main(rank: int) -> None:
        weights = variable(np.zeros(SHAPE))
        optimizer = distributed(other if rank else COMPRESSORS[1])
        with pytest.raises(Exception, match=r"powersgd\(rank=2\)") as raised:
            optimizer.apply_gradients([(tensor(gradient(rank, 0)), weights)])
        assert "settings" in str(raised.value)

    run_ranks(2, main)


def test_a_divided_state_needs_whole_gradients_elsewhere() -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"powersgd\(rank=2\) needs whole gradients|Keras 3"):
            distributed(COMPRESSORS[1], shard_state=True)

    run_ranks(1, main)
