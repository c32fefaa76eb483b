"""Optimizers of tf.compat.v1.train: parts of a batch on the ranks are the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.ranks import run_ranks

v1 = tf.compat.v1
Array = np.ndarray[Any, Any]
ROWS, STEPS = 12, 3
X = np.random.default_rng(1).normal(size=(STEPS, ROWS, 3)).astype(np.float32)
WORDS = np.random.default_rng(2).integers(0, 4, (STEPS, ROWS)).astype(np.int32)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "momentum": lambda: v1.train.MomentumOptimizer(0.2, 0.9),
    "adam": lambda: v1.train.AdamOptimizer(0.1),
}


class Model:
    """In the current graph, or eager."""

    def __init__(self) -> None:
        self.kernel = v1.Variable(np.ones((3, 2), np.float32), name="kernel")
        self.table = v1.Variable(np.arange(8, dtype=np.float32).reshape(4, 2), name="table")
        self.variables = [self.kernel, self.table]

    def loss(self, x: Any, words: Any) -> tf.Tensor:
        hidden = tf.tanh(tf.matmul(x, self.kernel)) * tf.nn.embedding_lookup(self.table, words)
        return tf.reduce_mean(hidden**2)


Step = Callable[[Any, tf.Tensor], Any]


def minimize(optimizer: Any, loss: tf.Tensor) -> Any:
    return optimizer.minimize(loss, global_step=v1.train.get_or_create_global_step())


def clip(optimizer: Any, loss: tf.Tensor) -> Any:
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
    return optimizer.apply_gradients(zip(clipped, variables, strict=True))


def train(
    make: Callable[[], Any], rows: slice, step: Step = minimize, repeat: int = 1
) -> list[Array]:
    """The variables after some steps in a session; each batch is run `repeat` times."""
    with tf.Graph().as_default(), v1.Session() as session:
        model, optimizer = Model(), make()
        x, words = v1.placeholder(tf.float32, [None, 3]), v1.placeholder(tf.int32, [None])
        operation = step(optimizer, model.loss(x, words))
        session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
        for batch, labels in zip(X, WORDS, strict=True):
            for _ in range(repeat):
                session.run(operation, {x: batch[rows], words: labels[rows]})
        assert all(optimizer.get_slot_names())
        return list(session.run(model.variables))


def part(rank: int, size: int) -> slice:
    return slice(rank * ROWS // size, (rank + 1) * ROWS // size)


def assert_close(result: list[Array], expected: list[Array]) -> None:
    for each, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(each, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "size", "step"),
    [("momentum", 1, clip), ("adam", 2, clip), ("momentum", 3, minimize)],
)
def test_parts_are_the_whole_batch(kind: str, size: int, step: Step) -> None:
    expected = train(OPTIMIZERS[kind], slice(0, ROWS), step)

    def make() -> Any:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS[kind](), groups=1)
        assert isinstance(optimizer, type(OPTIMIZERS[kind]()))
        return optimizer

    def main(rank: int) -> None:
        assert_close(train(make, part(rank, size), step), expected)

    run_ranks(size, main)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_in_tensorflow_2(mode: str) -> None:
    def steps(optimizer: Any, rows: slice) -> list[Array]:
        model = Model()

        def step(x: Any, words: Any) -> None:
            optimizer.minimize(lambda: model.loss(x, words), var_list=model.variables)

        run = tf.function(step) if mode == "graph" else step
        for batch, words in zip(X, WORDS, strict=True):
            run(tf.constant(batch[rows]), tf.constant(words[rows]))
        return [each.numpy() for each in model.variables]

    expected = steps(OPTIMIZERS["momentum"](), slice(0, ROWS))

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(OPTIMIZERS["momentum"]())
        assert_close(steps(optimizer, part(rank, 2)), expected)

    run_ranks(2, main)


@pytest.mark.parametrize(("size", "average"), [(1, False), (2, True)])
def test_several_passes_make_a_step(size: int, average: bool) -> None:
    def summed(optimizer: Any, loss: tf.Tensor) -> Any:
        return minimize(optimizer, loss if average else 3 * loss)

    expected = train(OPTIMIZERS["momentum"], slice(0, ROWS), summed)

    def make() -> Any:
        return hvd.DistributedOptimizer(
            OPTIMIZERS["momentum"](),
            backward_passes_per_step=3,
            average_aggregated_gradients=average,
            sparse_as_dense=True,
        )

    def main(rank: int) -> None:
        assert_close(train(make, part(rank, size), repeat=3), expected)

    run_ranks(size, main)


def test_several_passes_of_other_batches() -> None:
    def main(rank: int) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.Variable([0.0, 10.0])
            factor = v1.placeholder(tf.float32)
            optimizer = hvd.DistributedOptimizer(
                v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2
            )
            step = optimizer.minimize(tf.reduce_sum(variable * factor))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            seen = []
            for number in range(6):
                session.run(step, {factor: number + rank})
                seen.append(session.run(variable)[0])
        assert seen == [0, -2, -2, -8, -8, -18]  # 0.5 + 1.5, 2.5 + 3.5, 4.5 + 5.5

    run_ranks(2, main)


def adasum(a: Array, b: Array) -> Array:
    dot, norms = float(np.vdot(a, b)), (float(np.vdot(a, a)), float(np.vdot(b, b)))
    return np.asarray(a * (1 - dot / norms[0] / 2) + b * (1 - dot / norms[1] / 2))


@pytest.mark.parametrize("passes", [1, 2])
def test_adasum_combines_what_the_steps_have_changed(passes: int) -> None:
    directions = [np.array([1.0, 2.0]), np.array([3.0, -1.0])]

    def main(rank: int) -> None:
        with tf.Graph().as_default(), v1.Session() as session:
            variable = v1.Variable([5.0, 5.0], dtype=tf.float64)
            optimizer = hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(0.5, 0.5), op=hvd.Adasum, backward_passes_per_step=passes
            )
            step = optimizer.minimize(tf.reduce_sum(variable * directions[rank]))
            session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
            local, velocity = np.array([5.0, 5.0]), np.zeros((2, 2))
            expected = local
            for _ in range(2):
                steps = np.zeros((2, 2))
                for _ in range(passes):
                    session.run(step)
                    velocity = 0.5 * velocity + directions
                    steps -= 0.5 * velocity
                expected = expected + adasum(*steps)
                np.testing.assert_allclose(session.run(variable), expected)

    run_ranks(2, main)


def test_local_variables_and_a_process_set() -> None:
    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 1])
        local, shared = tf.Variable(0.0), tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            v1.train.GradientDescentOptimizer(1.0), process_set=pair
        )
        optimizer.register_local_var(local)
        optimizer.minimize(lambda: (local + shared) * 2.0 * (rank + 1), var_list=[local, shared])
        expected = {0: (-1, -3), 1: (-2, -3), 2: (-6, -6)}[rank]
        assert (float(local), float(shared)) == expected

    run_ranks(3, main)


def test_gradients_of_one_rank_alone_are_refused() -> None:
    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
        variable = tf.Variable(1.0, name="weight")
        loss = lambda: variable * variable  # noqa: E731
        pairs = optimizer.compute_gradients(loss, var_list=[variable])
        optimizer.apply_gradients([(tf.clip_by_value(pairs[0][0], -1, 1), variable)])
        for again in (pairs, [(tf.constant(1.0), variable)]):
            with pytest.raises(RuntimeError, match="of weight:0: the ranks' variables would drift"):
                optimizer.apply_gradients(again)
        with tf.Graph().as_default():
            variable = v1.Variable(1.0)
            square = variable * variable
            pairs = optimizer.compute_gradients(square)
            for own in (v1.gradients(square, [variable])[0], 1.0):
                with pytest.raises(RuntimeError, match="would drift apart"):
                    optimizer.apply_gradients([(own, variable)])
            optimizer.apply_gradients(pairs)
            assert optimizer.apply_gradients([(2 * tf.tanh(pairs[0][0]), variable)]) is not None

        @tf.function
        def step(variable: Any) -> None:
            pairs = optimizer.compute_gradients(lambda: variable * variable, [variable])
            if tf.reduce_sum(pairs[0][0]) > 0:
                optimizer.apply_gradients([(0.5 * pairs[0][0], variable)])

        second = tf.Variable(1.0 + rank)
        step(second)
        assert float(second) == 1 + rank - 1.5

    run_ranks(2, main)


def test_an_optimizer_of_keras_is_wrapped_by_hvdlite_keras() -> None:
    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), op=hvd.Sum, scale_local_gradients=False
        )
        assert isinstance(optimizer, tf.keras.optimizers.SGD)
        shared, local = (tf.keras.Variable(0.0, name=name) for name in ("shared", "local"))
        optimizer.build([shared, local])
        optimizer.register_local_var(local)
        gradient = tf.constant(1.0 + rank)
        optimizer.apply_gradients([(gradient, shared), (gradient, local)])
        assert (float(shared.numpy()), float(local.numpy())) == (-3, -1 - rank)

    run_ranks(2, main)


def test_misuse() -> None:
    def main(rank: int) -> None:
        def wrap(**options: Any) -> Any:
            return hvd.DistributedOptimizer(OPTIMIZERS["adam"](), **options)

        for options, text in (
            ({"backward_passes_per_step": 2}, "needs a graph"),
            ({"backward_passes_per_step": 0}, "must be > 0"),
            ({"op": hvd.Adasum, "average_aggregated_gradients": True}, "average_aggregated"),
            ({"op": hvd.Sum, "gradient_predivide_factor": 2.0}, "op != Average"),
            ({"groups": -1}, "groups should be"),
        ):
            with pytest.raises(ValueError, match=text):
                wrap(**options)
        with pytest.raises(ValueError, match="wrap it once"):
            hvd.DistributedOptimizer(wrap())
        with tf.Graph().as_default(), pytest.raises(ValueError, match="sparse_as_dense=True"):
            optimizer = wrap(backward_passes_per_step=2)
            optimizer.minimize(Model().loss(X[0], WORDS[0]))

    run_ranks(1, main)


def test_a_monitored_session_trains_as_one_process_would(tmp_path: Path) -> None:
    batches = np.arange(12, dtype=np.float32).reshape(3, 2, 2) / 10

    def train(rank: int, rounds: int, size: int) -> list[float]:
        with tf.Graph().as_default():
            variable = v1.get_variable("weight", initializer=[1.0 + 5 * rank, 2.0])
            x = v1.placeholder(tf.float32, [None, 2])
            optimizer = v1.train.MomentumOptimizer(0.1, 0.5)
            hooks = []
            if size > 1:
                optimizer = hvd.DistributedOptimizer(optimizer)
                hooks = [hvd.BroadcastGlobalVariablesHook(0)]
            step = optimizer.minimize(
                tf.reduce_mean((x * variable) ** 2), v1.train.get_or_create_global_step()
            )
            folder = str(tmp_path / f"of {size}") if rank == 0 else None
            with v1.train.MonitoredTrainingSession(
                checkpoint_dir=folder, hooks=hooks, save_checkpoint_steps=3, save_summaries_steps=0
            ) as session:
                assert session.run(v1.train.get_global_step()) == 3 * rounds
                for batch in batches:
                    session.run(step, {x: batch[rank::size]})
                result: list[float] = session.run(variable).tolist()
            return result

    for rounds in range(2):  # the second time rank 0 goes on from its checkpoint
        expected = train(0, rounds, 1)
        for result in run_ranks(2, lambda rank, rounds=rounds: train(rank, rounds, 2)):
            np.testing.assert_allclose(result, expected, rtol=1e-5)
