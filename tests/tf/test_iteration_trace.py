"""The iteration trace in loops of TensorFlow, eagerly and in graphs."""

from __future__ import annotations

import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.ranks import run_ranks


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
def test_a_loop_with_a_tape(graph: bool) -> None:
    def main(rank: int) -> None:
        weight = tf.Variable(tf.ones((4, 3)))

        def step() -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(tf.ones((2, 4)), weight) ** 2)
            (gradient,) = hvd.DistributedGradientTape(tape).gradient(loss, [weight])
            weight.assign_sub(0.1 * gradient)

        train = tf.function(step) if graph else step
        with hvd.trace_iterations() as trace:
            for _ in range(3):
                with trace.iteration():
                    train()
            rows = trace.rows()
        assert [row.iteration for row in rows] == [0, 1, 2]
        for row in rows:
            assert row.bp_end is not None
            (segment,) = row.segments
            assert row.fp_start < row.bp_end <= segment.start < segment.end < row.iteration_end
            assert segment.bytes == 48 and row.overlap == 0

    run_ranks(2, main)
