"""The steps that JAX compiles: what only they can do, and what they lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hvdlite.keras as hvd
from hvdlite.keras.framework import keras
from hvdlite.keras.variables import optimizer_variables
from tests.elastic_job import ElasticJob, Worker
from tests.keras.training import (
    BACKEND,
    INPUTS,
    TARGETS,
    assert_close,
    assert_same,
    make_model,
    numpy_of,
    sgd,
    share,
    step_by,
    tensor,
    variable,
)
from tests.ranks import run_ranks

if BACKEND != "jax":
    pytest.skip("a matter of JAX", allow_module_level=True)

import jax
import jax.numpy as jnp
from jax.experimental.sparse import BCOO


def plain() -> Any:
    return keras.optimizers.SGD(1.0)


def distributed(**options: Any) -> Any:
    return hvd.DistributedOptimizer(plain(), **options)


def test_ranks_that_disagree_fail_alike_and_go_on() -> None:
    def main(rank: int) -> float:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1 + rank)])
        model.compile(distributed(), loss="mse")
        rows = np.ones((4, 3), np.float32), np.ones((4, 1 + rank), np.float32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="ranks disagree on shape"):
            model.fit(*rows, verbose=0)
        return float(hvd.allreduce(float(rank)))

    assert run_ranks(2, main) == [0.5, 0.5]


def test_a_loop_of_its_own_that_is_compiled_whole() -> None:
    def train(rank: int, size: int, optimizer: Any) -> Any:
        model = make_model()
        optimizer.build(model.trainable_variables)
        inputs, targets = share(INPUTS, rank, size), share(TARGETS, rank, size)

        def loss_of(weights: Any) -> Any:
            outputs, _ = model.stateless_call(weights, [], inputs)
            return jnp.mean((outputs - targets) ** 2)

        def step(state: Any, weights: Any) -> Any:
            return optimizer.stateless_apply(state, jax.grad(loss_of)(weights), weights)

        def body(carry: Any, _: Any) -> Any:
            weights, state = carry
            return step(state, weights), None

        start = [
            [each.value for each in variables]
            for variables in (model.trainable_variables, optimizer.variables)
        ]
        (weights, _), _ = jax.jit(lambda carry: jax.lax.scan(body, carry, None, 4))(tuple(start))
        return numpy_of(weights)

    everywhere = run_ranks(2, lambda rank: train(rank, 2, hvd.DistributedOptimizer(sgd())))
    assert_same(everywhere)
    assert_close(everywhere[0], train(0, 1, sgd()))


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.parametrize("passes", [1, 2])
def test_a_gradient_that_is_missing_changes_nothing(passes: int) -> None:
    def main(rank: int) -> list[float]:
        there, missing = variable([0], "there"), variable([5], "missing")
        optimizer = distributed(backward_passes_per_step=passes)
        for _ in range(passes):
            gradients = [tensor([1.0 + 2 * rank]), None]
            optimizer.apply_gradients(zip(gradients, [there, missing], strict=True))
        return [float(each.numpy()[0]) for each in (there, missing)]

    assert run_ranks(2, main) == [[-2 * passes, 5]] * 2


@pytest.mark.parametrize("passes", [1, 2])
def test_sparse_gradients_are_dense_or_refused(passes: int) -> None:
    def main(rank: int) -> np.ndarray:
        weights = variable(np.zeros((3, 2)))
        gradient = BCOO.fromdense(jnp.array([[0, 0], [1 + 2 * rank, 0], [0, 0]], jnp.float32))
        with pytest.raises(TypeError, match="give sparse_as_dense=True"):
            distributed(backward_passes_per_step=passes).apply_gradients([(gradient, weights)])
        optimizer = distributed(backward_passes_per_step=passes, sparse_as_dense=True)
        for _ in range(passes):
            optimizer.apply_gradients([(gradient, weights)])
        return numpy_of([weights])[0]

    for found in run_ranks(2, main):
        np.testing.assert_array_equal(found, [[0, 0], [-2 * passes, 0], [0, 0]])


def test_a_divided_state_over_variables_of_several_dtypes() -> None:
    """Values come back in the order of the variables, not of the shards."""

    def main(rank: int) -> Any:
        dtypes = ("float32", "float16", "float32")
        several = [
            keras.Variable(np.full(3 + number, number), dtype=dtype, name=f"v{number}")
            for number, dtype in enumerate(dtypes)
        ]
        optimizer = distributed(shard_state=True)
        gradients = [
            jnp.full(each.shape, 1 + 2 * rank + number, each.dtype)
            for number, each in enumerate(several)
        ]
        step_by(jax.jit(optimizer.stateless_apply), optimizer, gradients, several)
        return numpy_of(several)

    for found in run_ranks(2, main):
        for number, values in enumerate(found):
            np.testing.assert_array_equal(values, np.full(3 + number, -2))


def test_a_checkpoint_has_no_step_that_has_not_ended(tmp_path: Path) -> None:
    pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

    def start(passes: int) -> Any:
        weights = variable(np.zeros(2))
        optimizer = keras.optimizers.SGD(1.0, momentum=0.5)
        hvd.DistributedOptimizer(optimizer, backward_passes_per_step=passes)
        optimizer.build([weights])
        return weights, optimizer

    def main(rank: int) -> list[Any]:
        weights, optimizer = start(2)
        for _ in range(3):
            optimizer.apply_gradients([(tensor([1.0, 2.0]), weights)])
        hvd.checkpoint.save(tmp_path / "it", {"optimizer": optimizer})
        (_, plain), (_, again) = start(1), start(2)
        hvd.checkpoint.load(tmp_path / "it", {"optimizer": plain})
        hvd.checkpoint.save(tmp_path / "plain", {"optimizer": plain})
        hvd.checkpoint.load(tmp_path / "plain", {"optimizer": again})
        return [numpy_of(optimizer_variables(each)) for each in (optimizer, plain, again)]

    for everywhere in run_ranks(2, main):
        assert_same(everywhere)
        assert len(everywhere[1]) == 3  # the count of passes, the rate and the momentum


def test_a_callback_alone_reads_and_sets_what_only_the_step_has() -> None:
    def main(rank: int) -> float:
        model = make_model()
        model.compile(distributed(), loss="mse")
        rates = hvd.callbacks.LearningRateScheduleCallback(
            1.0, lambda epoch: 0.0, staircase=False, momentum_correction=False
        )
        model.fit(INPUTS, TARGETS, batch_size=12, verbose=0, callbacks=[rates])
        assert_same([numpy_of(model.get_weights()), numpy_of(make_model().get_weights())])
        return float(model.optimizer.learning_rate.numpy())

    assert run_ranks(2, main) == [0, 0]


def test_a_step_is_compiled_anew_for_another_number_of_ranks() -> None:
    job = ElasticJob(3)

    class Dying(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, worker: Worker) -> None:
            super().__init__()
            self.worker = worker

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if self.worker.number == 1 and epoch == 1:
                self.worker.die()

    def main(worker: Worker) -> list[float]:
        layer = keras.layers.Dense(2, bias_initializer="ones", kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((4,)), layer])
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.0))
        model.compile(optimizer, loss=lambda _, outputs: outputs * hvd.size())
        losses: list[float] = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            counting = hvd.elastic.UpdateEpochStateCallback(state)
            commit = hvd.elastic.CommitStateCallback(state)
            found = model.fit(
                INPUTS, TARGETS, epochs=3 - state.epoch, verbose=0,
                callbacks=[counting, commit, Dying(worker)],
            )  # fmt: skip
            losses.extend(found.history["loss"])

        train(hvd.elastic.KerasState(model, epoch=0, batch=0))
        return losses[-1:]

    assert job.run(main) == [[2], None, [2]]


def test_a_step_that_fails_loses_no_state() -> None:
    """It got the memory of all there was: seeds of dropout and sums of passes, too."""
    job = ElasticJob(3)
    batches = 8

    class Dying(keras.callbacks.Callback):  # type: ignore[misc]
        def __init__(self, worker: Worker, state: Any) -> None:
            super().__init__()
            self.worker, self.state = worker, state

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            if (self.worker.number, self.state.epoch, batch) == (1, 1, 3):
                self.worker.die()

    def main(worker: Worker) -> Any:
        dropout = keras.layers.Dropout(0.5, seed=worker.number)
        model = keras.Sequential([keras.Input((4,)), dropout, keras.layers.Dense(2)])
        model.set_weights([np.ones((4, 2)), np.zeros(2)])
        optimizer = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
        model.compile(optimizer, loss="mse")
        state = hvd.elastic.KerasState(model, epoch=0, batch=0)

        @hvd.elastic.run
        def train(state: Any) -> None:
            model.fit(
                INPUTS[: 4 * batches], TARGETS[: 4 * batches], batch_size=4, verbose=0,
                epochs=3 - state.epoch, shuffle=False,
                callbacks=[
                    hvd.elastic.CommitStateCallback(state, 2),
                    hvd.elastic.UpdateBatchStateCallback(state),
                    hvd.elastic.UpdateEpochStateCallback(state),
                    Dying(worker, state),
                ],
            )  # fmt: skip

        train(state)
        seed = [int(each) for each in dropout.seed_generator.state.numpy()]
        return numpy_of(model.get_weights()), int(optimizer.iterations.numpy()), seed

    (weights, passes, seed), _, (others, other_passes, other_seed) = job.run(main)
    assert_same([weights, others])
    assert passes == other_passes == 3 * batches
    assert seed[0] != other_seed[0] and seed[1] == other_seed[1]
