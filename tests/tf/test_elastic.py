"""Elastic training with TensorFlow: states, errors of graphs, and jobs that lose and gain ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime import worlds
from hvdlite.tf.sync_batch_norm import moments
from tests.elastic_job import ElasticJob, Worker
from tests.elastic_sparse import (
    COLUMNS,
    KILL_STEP,
    RATE,
    ROWS,
    STEPS,
    History,
    check_training,
    members,
    rows_of,
    total,
)
from tests.ranks import run_ranks


def test_the_vectors_of_a_state() -> None:
    def main(rank: int) -> None:
        variables = [
            tf.Variable(tf.fill((3, 2), float(rank or 0.5))),
            tf.Variable(tf.cast(tf.fill((4,), float(rank or 0.5)), tf.bfloat16)),
        ]
        state = hvd.elastic.TensorFlowState(variables, step=7 + rank, round=3 + rank)

        def found() -> tuple[set[float], int, int]:
            values = {float(v) for each in variables for v in each.numpy().reshape(-1)}
            return values, state.step, state.round

        def change(step: int) -> None:
            for each in variables:
                each.assign(tf.cast(tf.fill(each.shape, 9.0), each.dtype))
            state.step, state.round = step, step // 2

        state.sync()
        assert found() == ({0.5}, 7, 3)
        change(8)
        state.restore()
        assert found() == ({0.5}, 7, 3)
        change(8)
        state.commit()
        change(0)
        state.restore()
        assert found() == ({9.0}, 8, 4)

    run_ranks(3, main)


def test_each_sync_broadcasts_and_the_constructor_does_not() -> None:
    def main(rank: int) -> list[float]:
        variable = tf.Variable(float(rank))
        if rank == 0:  # alone, so it would wait for others
            hvd.elastic.TensorFlowState([tf.Variable(1.0)])
        state = hvd.elastic.TensorFlowState([variable])
        found = [float(variable.numpy())]
        for number in (10.0, 20.0):
            variable.assign(number + rank)
            state.sync()
            found.append(float(variable.numpy()))
        return found

    assert run_ranks(2, main) == [[0, 10, 20], [1, 10, 20]]


def test_variables_must_be_given_when_executing_eagerly() -> None:
    with pytest.raises(ValueError, match=r"give model\.variables"):
        hvd.elastic.TensorFlowState()


def test_other_variables_are_named_on_all_ranks() -> None:
    def main(rank: int) -> str:
        state = hvd.elastic.TensorFlowState([tf.Variable(tf.zeros(2 + rank), name="w")])
        with pytest.raises(ValueError, match="variables") as error:
            state.sync()
        return str(error.value)

    texts = run_ranks(2, main)
    assert texts[0] == texts[1] and "shape (2,) on rank 0" in texts[0]
    assert "shape (3,) on rank 1" in texts[0]


@pytest.mark.parametrize("shape", [[None], [None, 2], None])
def test_a_variable_that_has_grown_gives_its_shape(shape: Any) -> None:
    """Whoever comes later has made it as it was at the beginning."""

    def main(rank: int) -> None:
        tail = [2] if shape == [None, 2] else []
        grown = tf.Variable(tf.fill([1, *tail], float(rank)), shape=tf.TensorShape(shape))
        fixed = tf.Variable([1.0 + rank, 2.0])
        state = hvd.elastic.TensorFlowState([grown, fixed])
        if rank == 0:
            grown.assign(tf.fill([5, *tail], 7.0))
        for _ in range(2):
            state.sync()
            assert grown.numpy().tolist() == np.full([5, *tail], 7.0).tolist()
            assert fixed.numpy().tolist() == [1.0, 2.0]
            grown.assign(tf.fill([3, *tail], 9.0))
            state.restore()
            assert grown.numpy().tolist() == np.full([5, *tail], 7.0).tolist()

    run_ranks(3, main)


def test_a_variable_whose_shape_may_change_on_one_rank_alone_is_named() -> None:
    def main(rank: int) -> str:
        shape = tf.TensorShape([None] if rank else [2])
        state = hvd.elastic.TensorFlowState([tf.Variable([1.0, 2.0], shape=shape, name="w")])
        with pytest.raises(ValueError, match="variables") as error:
            state.sync()
        return str(error.value)

    texts = run_ranks(2, main)
    assert texts[0] == texts[1] and "shape (2,) on rank 0 and float32 of shape (None,)" in texts[0]


def test_a_new_variable_of_any_shape_begins_with_zeros() -> None:
    def main(_: int) -> None:
        state = hvd.elastic.TensorFlowState([tf.Variable(1.0)])
        new = tf.Variable([1.0, 2.0, 3.0], shape=tf.TensorShape([None]))
        state.variables.append(new)
        state.restore()
        assert new.numpy().tolist() == [0.0, 0.0, 0.0]

    run_ranks(1, main)


def test_global_variables_of_a_session() -> None:
    def main(rank: int) -> None:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", initializer=[1.0 + rank, 2.0])
            session.run(tf.compat.v1.global_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, step=rank)
            state.sync()
            assert session.run(variable).tolist() == [1.0, 2.0] and state.step == 0
            variable.load([5.0, 5.0], session)
            state.restore()
            assert session.run(variable).tolist() == [1.0, 2.0]

    run_ranks(2, main)


def test_a_function_that_was_traced_goes_on_in_the_next_world() -> None:
    """Size and rank are those of the world; the weights are those that numpy computes."""
    job = ElasticJob(3)

    def main(worker: Worker) -> Any:
        weights = tf.Variable(tf.zeros(2, tf.float64))
        traces = []

        @tf.function
        def step(factor: tf.Tensor) -> tf.Tensor:
            traces.append(1)
            mean = hvd.allreduce(tf.ones(2, tf.float64) * factor, op=hvd.Average, name="gradient")
            weights.assign_sub(0.1 * mean)
            return hvd.size_op()

        @hvd.elastic.run
        def train(state: Any) -> Any:
            while state.step < 9:
                if (worker.number, state.step) == (1, 3):
                    worker.die()
                if (worker.number, state.step) == (0, 6) and len(job.workers) == 3:
                    job.add(main)
                size = step(tf.constant(float(hvd.rank() + 1), tf.float64))
                state.history = [*state.history, int(size.numpy())]
                state.step += 1
                state.commit()
            return weights.numpy(), state.history, len(traces)

        return train(hvd.elastic.TensorFlowState([weights], step=0, history=[]))

    results = [result for result in job.run(main) if result is not None]
    assert len(results) == 3
    for weights, history, traces in results:
        assert history == results[0][1] and traces == 1
        assert np.array_equal(weights, results[0][0])
        mean = sum(np.mean(np.arange(size) + 1) for size in history)
        np.testing.assert_allclose(weights, -0.1 * mean * np.ones(2))
    assert set(results[0][1]) == {2, 3}


def test_traced_gradients_have_the_rank_and_the_size_of_the_next_world() -> None:
    """They follow Horovod's law, and those of synchronized moments are those of one batch."""
    job = ElasticJob(3)
    whole = tf.constant([[1.0], [2.0], [4.0]])

    def main(worker: Worker) -> Any:
        ranks, local = tf.Variable([0.0]), tf.Variable(1.0)
        batch = tf.Variable([[0.0]])
        traces = []

        @tf.function
        def gradients() -> Any:
            traces.append(1)
            with tf.GradientTape(persistent=True) as tape:
                gathered = hvd.allgather(ranks, name="gathered") ** 2 / 2
                sent = hvd.broadcast(ranks, 0, name="sent") * 5
                scattered = hvd.reducescatter(tf.tile(ranks, [6]), op=hvd.Sum, name="scattered")
                own = local * 6
                mean, variance = moments(batch, [0], None, hvd.global_process_set)
                loss = mean + variance * 3
            shared = [tape.gradient(each, ranks) for each in (gathered, sent, scattered)]
            shared.append(tape.gradient(loss, batch)[0])
            tape = hvd.DistributedGradientTape(tape)
            tape.register_local_source(local)
            return [*(each[0] for each in shared), tape.gradient(own, local)]

        @hvd.elastic.run
        def train(state: Any) -> Any:
            ranks.assign([float(hvd.rank())])
            batch.assign(whole[hvd.rank() : hvd.rank() + 1])
            found = [float(each) for each in gradients()]
            rank, size = hvd.rank(), hvd.size()
            with tf.GradientTape() as tape:
                tape.watch(whole)
                mean, variance = tf.nn.moments(whole[:size], [0])
                loss = mean + variance * 3
            of_whole = tape.gradient(loss, whole)[rank, 0]
            expected = [rank, 0.0 if rank else 5.0, 6 * size, float(of_whole) * size, 6 / size]
            np.testing.assert_allclose(found, expected, rtol=1e-5)
            state.commit()
            if size == 3:
                if rank == 0:
                    worker.die()
                hvd.barrier()
            return rank, len(traces)

        return train(hvd.elastic.TensorFlowState([]))

    assert job.run(main) == [None, (0, 1), (1, 1)]


def test_errors_of_tensorflow_are_judged_by_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation of the user fails with the same class, and with any text."""
    broken = False
    monkeypatch.setattr(worlds, "world_is_broken", lambda: broken)
    monkeypatch.setattr(worlds, "elastic", lambda: True)
    is_loss = hvd.elastic.is_loss_in_tensorflow
    errors = [
        kind(None, None, text)
        for kind in (
            tf.errors.UnknownError, tf.errors.FailedPreconditionError, tf.errors.AbortedError,
            tf.errors.InternalError,
        )
        for text in ("HorovodAllreduce failed", "the disk is full")
    ]  # fmt: skip
    assert not any(map(is_loss, errors))
    broken = True
    assert all(map(is_loss, errors))
    assert not is_loss(ZeroDivisionError())
    broken = False
    assert is_loss(HorovodInternalError("a rank is lost"))


def test_shapes_that_ranks_disagree_about_leave_the_loop() -> None:
    def main(worker: Worker) -> int:
        entered = []

        @hvd.elastic.run
        def train(state: Any) -> None:
            entered.append(1)
            hvd.allreduce(tf.ones(hvd.rank() + 1), name="wrong")

        with pytest.raises(tf.errors.FailedPreconditionError) as error:
            train(hvd.elastic.TensorFlowState([], step=0))
        assert isinstance(error.value, HorovodInternalError) and error.value.job_goes_on
        return len(entered)

    assert ElasticJob(2).run(main) == [1, 1]


@pytest.mark.parametrize("op", [hvd.Sum, hvd.Adasum])
def test_a_session_begins_the_passes_of_a_step_anew(op: Any) -> None:
    """Adasum steps in each pass, and exchanges what the passes since the restore have changed."""

    def main(rank: int) -> list[float]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            weight = tf.compat.v1.get_variable("v", initializer=0.0)
            optimizer = hvd.DistributedOptimizer(
                tf.compat.v1.train.GradientDescentOptimizer(1.0), op=op, backward_passes_per_step=2
            )
            step = optimizer.minimize(weight * (1.0 + rank), var_list=[weight])
            session.run(tf.compat.v1.global_variables_initializer())
            session.run(tf.compat.v1.local_variables_initializer())
            state = hvd.elastic.TensorFlowState(session=session, optimizer=optimizer)
            session.run(step)
            state.restore()
            found = []
            for _ in range(3):
                session.run(step)
                found.append(float(session.run(weight)))
            return found

    sums = [0.0, -2.0 * (1 + 2), -2.0 * (1 + 2)]
    # Steps that point the same way are averaged.
    steps = [[-1.0 - rank, -3.0, -4.0 - rank] for rank in range(2)]
    assert run_ranks(2, main) == ([sums] * 2 if op == hvd.Sum else steps)


@pytest.mark.parametrize("scaled", [False, True])
def test_an_optimizer_of_keras_begins_the_passes_of_a_step_anew(scaled: bool) -> None:
    def main(rank: int) -> list[float]:
        weight = tf.Variable(0.0)
        optimizer = hvd.DistributedOptimizer(
            tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2
        )
        if scaled:
            optimizer = tf.keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        optimizer.build([weight])
        variables = [weight, *optimizer.variables]
        state = hvd.elastic.TensorFlowState(variables, optimizer=optimizer)
        found = []
        for number in range(3):
            optimizer.apply_gradients([(tf.constant(1.0), weight)])
            found.append(float(weight))
            if number == 0:
                state.restore()
        return found

    assert run_ranks(2, main) == [[0.0, 0.0, -2.0]] * 2


@pytest.mark.parametrize("in_graph", [False, True])
def test_slices_are_in_flight_when_a_rank_dies(in_graph: bool) -> None:
    def main(worker: Worker) -> tuple[Any, History]:
        weights = tf.Variable(tf.zeros((ROWS, COLUMNS), tf.float64))

        def gradient_of(rows: tf.Tensor) -> tuple[tf.IndexedSlices, tf.IndexedSlices]:
            with tf.GradientTape() as tape:
                found = tf.gather(weights, rows)
                loss = tf.reduce_sum(tf.square(found - worker.number))
            gradient = hvd.DistributedGradientTape(tape).gradient(loss, weights)
            ones = tf.IndexedSlices(tf.ones_like(rows), rows, tf.constant([ROWS], tf.int64))
            return gradient, hvd.allreduce(ones, op=hvd.Sum, name="counts")

        signature = [tf.TensorSpec([None], tf.int64)]
        compute = tf.function(gradient_of, signature) if in_graph else gradient_of

        @hvd.elastic.run
        def train(state: Any) -> None:
            while state.step < STEPS:
                if (worker.number, state.step) == (1, KILL_STEP):
                    worker.die()
                rows = tf.constant(rows_of(worker.number, state.step), tf.int64)
                gradient, counts = compute(rows)
                assert isinstance(gradient, tf.IndexedSlices)
                weights.scatter_sub(tf.IndexedSlices(RATE * gradient.values, gradient.indices))
                counted = tf.math.unsorted_segment_sum(counts.values, counts.indices, ROWS)
                assert np.array_equal(counted, total(members(worker), state.step))
                state.history = [*state.history, members(worker)]
                state.step += 1
                state.commit()

        state = hvd.elastic.TensorFlowState([weights], step=0, history=[])
        train(state)
        return weights.numpy(), state.history

    check_training(main)
