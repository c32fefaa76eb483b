"""`tf.IndexedSlices` that are in flight when a rank dies."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.elastic_job import Worker
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
