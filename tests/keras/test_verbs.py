"""The collectives on values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite import numpy as hvd
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.keras import mpi_ops as verbs
from hvdlite.keras.framework import LEGACY, keras
from tests.ranks import run_ranks


def numpy_of(tensor: Any) -> np.ndarray:
    """The value of a tensor, which must be one of the backend."""
    package = type(tensor).__module__.partition(".")[0]
    assert package.removesuffix("lib") == keras.backend.backend(), type(tensor)
    return np.asarray(tensor)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        ({}, 1.5),
        ({"average": True}, 1.5),
        ({"average": False}, 3.0),
        ({"op": hvd.Sum}, 3.0),
        ({"op": hvd.Max, "name": "largest"}, 2.0),
        ({"op": hvd.Sum, "prescale_factor": 2.0, "postscale_factor": 5.0}, 30.0),
    ],
)
@pytest.mark.filterwarnings("ignore:average= is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [float, np.float64, lambda value: [float(value)] * 3])
def test_allreduce(make: Any, arguments: dict[str, Any], expected: float) -> None:
    results = run_ranks(2, lambda rank: verbs.allreduce(make(rank + 1), **arguments))
    for result in results:
        np.testing.assert_array_equal(numpy_of(result), np.full(np.shape(make(1)), expected))


def test_allgather() -> None:
    results = run_ranks(2, lambda rank: verbs.allgather(np.full((rank + 1, 2), rank), name="rows"))
    for result in results:
        np.testing.assert_array_equal(numpy_of(result), [[0, 0], [1, 1], [1, 1]])


def test_broadcast() -> None:
    results = run_ranks(3, lambda rank: verbs.broadcast(np.arange(3) * rank, 2))
    for result in results:
        np.testing.assert_array_equal(numpy_of(result), [0, 2, 4])


def test_reducescatter() -> None:
    results = run_ranks(2, lambda rank: verbs.reducescatter(np.arange(3.0) + rank, op=hvd.Sum))
    np.testing.assert_array_equal(numpy_of(results[0]), [1, 3])
    np.testing.assert_array_equal(numpy_of(results[1]), [5])


def test_variables_are_values() -> None:
    def main(rank: int) -> np.ndarray:
        layer = keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant(float(rank)))
        layer.build((None, 2))
        return numpy_of(verbs.allreduce(layer.kernel))

    for result in run_ranks(2, main):
        np.testing.assert_array_equal(result, np.full((2, 2), 0.5))


def test_ranks_that_disagree_are_named() -> None:
    def main(rank: int) -> None:
        with pytest.raises(HorovodInternalError, match=r"'allreduce\.x': ranks disagree on shape"):
            verbs.allreduce(np.zeros(rank + 1), name="x")

    run_ranks(2, main)


def test_there_are_no_global_variables() -> None:
    with pytest.raises(RuntimeError, match="BroadcastGlobalVariablesCallback"):
        run_ranks(1, lambda rank: verbs.broadcast_global_variables(0))


@pytest.mark.skipif(not LEGACY, reason="Keras 3 has no sessions")
def test_global_variables_of_a_session() -> None:
    import tensorflow as tf

    def main(rank: int) -> list[float]:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("v", initializer=[1.0 * rank, 2.0])
            session.run(tf.compat.v1.global_variables_initializer())
            verbs.broadcast_global_variables(1)
            return list(session.run(variable))

    assert run_ranks(2, main) == [[1, 2], [1, 2]]
