"""Variables and objects from one rank to the others: eager, in functions and in sessions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.ranks import run_ranks

VALUES = [np.arange(6.0).reshape(2, 3), np.array([True, False]), np.array(7, np.int64)]


def of_rank(rank: int) -> list[Any]:
    return [value * (value.dtype.type(rank + 1)) for value in VALUES[:1]] + [
        np.array([rank == 1, rank == 0]),
        VALUES[2] + rank,
    ]


def assert_values(variables: list[Any], rank: int) -> None:
    for variable, value in zip(variables, of_rank(rank), strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


@pytest.mark.parametrize("mode", ["eager", "graph"])
def test_variables(mode: str) -> None:
    def main(rank: int) -> None:
        variables = [tf.Variable(value) for value in of_rank(rank)]

        def broadcast() -> None:
            hvd.broadcast_variables(variables, root_rank=1, inplace=True)

        (tf.function(broadcast) if mode == "graph" else broadcast)()
        assert_values(variables, 1)

    run_ranks(3, main)


def test_variables_of_a_process_set_and_of_keras() -> None:
    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        layer = tf.keras.layers.Dense(2, bias_initializer=tf.keras.initializers.Constant(rank))
        layer.build((None, 3))
        if rank != 1:
            hvd.broadcast_variables(layer.weights, root_rank=2, process_set=pair)
        np.testing.assert_array_equal(layer.bias.numpy(), [max(rank, 2 * (rank != 1))] * 2)
        wrong = "not a member" if rank == 1 else "invalid root rank 1"
        with pytest.raises(tf.errors.InvalidArgumentError, match=wrong):
            hvd.broadcast_variables(layer.weights, root_rank=1, process_set=pair)

    run_ranks(3, main)


def test_global_variables_in_a_session() -> None:
    def main(rank: int) -> None:
        with tf.Graph().as_default():
            kinds = [tf.compat.v1.get_variable("ref", initializer=float(rank), use_resource=False),
                     tf.compat.v1.get_variable("resource", initializer=[rank, 5])]  # fmt: skip
            broadcast = hvd.broadcast_global_variables(root_rank=1)
            with tf.compat.v1.Session() as session:
                session.run(tf.compat.v1.global_variables_initializer())
                session.run(broadcast)
                reference, resource = session.run(kinds)
        assert reference == 1.0
        assert resource.tolist() == [1, 5]

    run_ranks(2, main)


def test_global_variables_when_executing_eagerly() -> None:
    with pytest.raises(RuntimeError, match="does not support eager execution"):
        hvd.broadcast_global_variables(0)


def test_objects() -> None:
    def main(rank: int) -> None:
        mine = {"rank": rank, "table": np.full(3, rank)}
        assert [each["rank"] for each in hvd.allgather_object(mine)] == [0, 1, 2]
        received = hvd.broadcast_object(mine, root_rank=2)
        assert received["table"].tolist() == [2, 2, 2]
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            send = hvd.broadcast_object_fn(root_rank=1, session=session, name="in a graph")
            assert send(mine)["rank"] == 1
            assert len(hvd.allgather_object(rank, session=session)) == 3
        with pytest.raises(tf.errors.InvalidArgumentError, match="invalid root rank 3"):
            hvd.broadcast_object(mine, root_rank=3)

    run_ranks(3, main)
