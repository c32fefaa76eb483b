"""An error inside of a `tf.function` points at the line of the user that has made the operation."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.base.user_frames import OWN_FOLDER
from hvdlite.tf.calls import runner
from tests.ranks import run_ranks


@pytest.fixture(params=["auto", "off"], autouse=True)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "off":
        monkeypatch.setattr(runner, "library", lambda: None)
    yield


def in_a_branch(x: tf.Tensor) -> Any:
    return tf.cond(x[0] > 0, lambda: hvd.allgather(x, name="a"), lambda: x)


def in_a_loop(x: tf.Tensor) -> Any:
    return tf.while_loop(lambda i: i < 1, lambda i: i + hvd.allreduce(x, name="a")[0], [x[0] * 0])


def of_a_tape(x: tf.Tensor) -> Any:
    with hvd.DistributedGradientTape(tf.GradientTape()) as tape:
        tape.watch(x)
        loss = x * x
    return tape.gradient(loss, x)


def of_an_adjoint(x: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(hvd.allreduce(tf.ones(2), name="a")) * tf.reduce_sum(x)
    return hvd.allreduce(tape.gradient(total, x), name="b")


CALLS: list[Callable[[tf.Tensor], Any]] = [
    lambda x: hvd.allreduce(x, name="a"),
    lambda x: hvd.grouped_allreduce([x, x], name="a"),
    lambda x: hvd.reducescatter(x, name="a"),
    lambda x: hvd.broadcast(x, 0, name="a"),
    lambda x: hvd.allreduce(tf.IndexedSlices(tf.ones([1, x.shape[0]]), tf.constant([0]))).values,
    in_a_branch,
    in_a_loop,
    of_a_tape,
    of_an_adjoint,
]


@pytest.mark.parametrize("call", CALLS)
def test_the_last_line_is_the_users(call: Callable[[tf.Tensor], Any]) -> None:
    """Ranks disagree on the shape; where only rows may differ, on the data type."""

    def main(rank: int) -> None:
        @tf.function(autograph=False)  # TensorFlow tells nothing of one that is a lambda.
        def step(x: tf.Tensor) -> Any:
            return call(x)

        inputs = tf.ones(3 + rank)
        if call is in_a_branch:
            inputs = tf.ones(3, [tf.float32, tf.float64][rank])
        with pytest.raises(tf.errors.OpError, match="ranks disagree") as error:
            step(inputs)
        frames = re.findall(r'File "(.*?)", line (\d+), in (\S+)', str(error.value))
        assert frames and frames[-1][0] == __file__, error.value
        first = call.__code__.co_firstlineno
        assert first <= int(frames[-1][1]) <= first + 6, frames
        assert not [file for file, _, _ in frames if file.startswith(OWN_FOLDER)], frames

    run_ranks(2, main)


def test_a_question_that_has_no_answer() -> None:
    def main(rank: int) -> None:
        @tf.function
        def step() -> Any:
            return hvd.size_op(7)

        with pytest.raises(tf.errors.OpError, match="no process set with the id 7") as error:
            step()
        made = str(error.value).partition("Detected at node")[2].partition("ValueError")[0]
        assert __file__ in made and OWN_FOLDER not in made.partition("Traceback")[0], made

    run_ranks(1, main)
