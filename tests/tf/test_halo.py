"""Halos of TensorFlow's tensors, eager and in graphs, and their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.ranks import run_ranks


@pytest.mark.parametrize("graph", [False, True])
def test_edges_and_gradients(graph: bool) -> None:
    whole = np.arange(2 * 9 * 3, dtype=np.float32).reshape(2, 9, 3)
    padded = np.pad(whole, ((0, 0), (1, 2), (0, 0)))
    weights = [np.random.default_rng(rank).random((2, 6, 3), np.float32) for rank in range(3)]
    wanted = np.zeros_like(padded)
    for rank, weight in enumerate(weights):
        wanted[:, 3 * rank : 3 * rank + 6] += weight

    def main(rank: int) -> None:
        part = tf.constant(whole[:, 3 * rank : 3 * rank + 3])

        def run(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                output = hvd.halo(x, 1, 1, 2, name="halo")
            return output, tape.gradient(output, x, tf.constant(weights[rank]))

        signature = [tf.TensorSpec([None, 3, 3], tf.float32)]
        call = tf.function(run, input_signature=signature) if graph else run
        output, gradient = call(part)
        np.testing.assert_array_equal(output, padded[:, 3 * rank : 3 * rank + 6])
        np.testing.assert_allclose(gradient, wanted[:, 1:-2][:, 3 * rank : 3 * rank + 3], atol=1e-6)
        with pytest.raises(ValueError, match="before=4 is wider than the slice"):
            hvd.halo(part, 1, 4, 0)

    run_ranks(3, main)
