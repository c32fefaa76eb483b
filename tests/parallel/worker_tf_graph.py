"""One rank with one thread for TensorFlow's operations: nothing may wait for what cannot start."""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import json
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.gradients.buckets import CROWDED, ENOUGH_BYTES
from hvdlite.tf.native.loader import library
from tests.short_calls import short_calls

COLLECTIVES = 6
IN_A_SESSION = 4  # sessions take long to prepare large graphs
LIMIT_SECONDS = 60
STEPS, MOST_STEPS = 8, 2000


def own_order(count: int) -> list[int]:
    """Another order on every rank."""
    order = list(range(count))
    random.Random(hvd.rank()).shuffle(order)
    return order


def totals(tensor: Any, count: int = COLLECTIVES) -> dict[int, Any]:
    """Independent collectives, made in the order of this rank."""
    return {
        number: hvd.allreduce(tensor + float(number), op=hvd.Sum, name=f"total.{number}")
        for number in own_order(count)
    }


def check(results: dict[int, Any]) -> None:
    size = hvd.size()
    for number, result in results.items():
        expected = size * (size - 1) / 2 + size * number
        np.testing.assert_array_equal(result, np.full(3, expected, np.float32))


def run_in_functions() -> None:
    """In one graph without loops, and in loops that run one after the other."""
    own = tf.fill([3], float(hvd.rank()))
    check({n: tensor.numpy() for n, tensor in tf.function(totals)(own).items()})

    @tf.function
    def loops(tensor: Any) -> Any:
        first, second = tensor, tensor
        for _ in tf.range(5):
            first = hvd.allreduce(first, name="first")
        for _ in tf.range(5):
            second = hvd.allreduce(second, name="second")
        return first, second

    mean = (hvd.size() - 1) / 2
    for tensor in loops(own):
        np.testing.assert_allclose(tensor.numpy(), np.full(3, mean))


def run_in_a_session() -> None:
    one_thread = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=one_thread) as session:
        results = totals(tf.fill([3], float(hvd.rank())), IN_A_SESSION)
        for _ in range(2):
            check(session.run(results))


def run_small_steps() -> None:
    """All gradients of a small model are one short call where the operations are compiled."""
    weights = [tf.Variable(tf.zeros([64, 64])) for _ in range(16)]

    @tf.function
    def step(factor: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.add_n([factor * tf.reduce_sum(each) * n for n, each in enumerate(weights)])
        return hvd.DistributedGradientTape(tape).gradient(loss, weights)

    step(tf.constant(0.0))
    made = 0
    for number in range(MOST_STEPS if library() else STEPS):
        mean = number * (hvd.size() - 1) / 2
        before = short_calls().completed
        gradients = step(tf.constant(float(number * hvd.rank())))
        made += short_calls().completed - before
        for index, gradient in enumerate(gradients):
            np.testing.assert_array_equal(gradient.numpy(), np.full((64, 64), mean * index))
        # Calls for which another rank is late are negotiated: on busy cores that may be many.
        if number + 1 >= STEPS and hvd.allreduce(float(made > 0), op=hvd.Min):
            break
    assert 0 < made <= number + 1 if library() else made == 0, made


def has_travelled(path: Path, tensor: str) -> bool:
    """Whether rank 0 has written to the timeline that this tensor was reduced."""
    try:
        events = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):  # it is being written
        return False
    tracks = {
        event["args"]["name"]: event["pid"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name" and "name" in event["args"]
    }
    pid = next((tracks[name] for name in tracks if name.endswith(tensor)), None)
    own = [event for event in events if event.get("pid") == pid and event["ph"] in "BE"]
    started = any(event.get("name") == "ALLREDUCE" for event in own)
    return started and own[-1]["ph"] == "E" and "args" in own[-1]


def run_gradients_during_backward(path: Path) -> None:
    """Backward goes on below the last layer only when that layer's gradient has arrived."""
    hvd.start_timeline(str(path))
    arrived = []

    def wait_for_the_last_layer() -> Any:
        end = time.monotonic() + LIMIT_SECONDS
        pause = threading.Event()
        while time.monotonic() < end and not arrived:
            if has_travelled(path, "grad_1"):
                arrived.append(True)
            pause.wait(0.01)
        return np.float32(1)

    @tf.custom_gradient
    def gate(tensor: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            opened = tf.numpy_function(wait_for_the_last_layer, [], tf.float32)
            opened.set_shape([])
            return upstream * opened

        return tf.identity(tensor), gradient

    width = CROWDED * ENOUGH_BYTES // 16  # less would wait for the gradient of the first layer
    first, last = (tf.Variable(tf.ones([4, columns])) for columns in (4, width))

    @tf.function
    def step(inputs: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(gate(inputs @ first) @ last)
        tape = hvd.DistributedGradientTape(tape)
        return tape.gradient(loss, [first, last], use_generic_names=True)

    step(tf.ones([2, 4]))
    assert arrived, "the gradient of the last layer did not travel while backward ran"
    hvd.stop_timeline()


def run_while_a_rank_is_killed() -> None:
    """Rank 1 dies while the others wait for it in a graph."""

    @tf.function
    def total(tensor: Any) -> Any:
        return hvd.allreduce(tensor, op=hvd.Sum, name="total")

    total(tf.ones(3))
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        total(tf.ones(3))
    except tf.errors.UnknownError as error:
        assert "rank 1" in str(error), error
    else:
        raise AssertionError("rank 1 is dead, and nobody has noticed")


def run_gradients_until_a_rank_is_killed(timeline: Path) -> None:
    run_gradients_during_backward(timeline)
    run_while_a_rank_is_killed()


def main() -> None:
    tf.config.threading.set_inter_op_parallelism_threads(int(os.environ["INTER_OP_THREADS"]))
    hvd.init()
    if sys.argv[1] == "starvation":
        run_in_functions()
        run_in_a_session()
        run_small_steps()
    else:
        run_gradients_until_a_rank_is_killed(Path(sys.argv[2]))
    print(f"rank {hvd.rank()} is content", flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
