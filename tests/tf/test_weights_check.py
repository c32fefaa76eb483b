"""HVDLITE_CHECK_WEIGHTS with tapes, eagerly and in graphs, and with optimizers of sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.plain.config import Config
from tests.ranks import run_ranks

v1 = tf.compat.v1
SIZE, STEPS = 2, 8
CHECKED = Config(check_weights=3)  # After the second step, then the third and the sixth.
Fault = Callable[[int, Any], None]  # (step, kernel)


def told(main: Callable[[int], None]) -> str:
    """What all ranks are told; empty where nothing has diverged."""

    def run(rank: int) -> str:
        try:
            main(rank)
        except (RuntimeError, tf.errors.OpError) as error:
            return str(error)
        return ""

    texts = run_ranks(SIZE, run, config=CHECKED)
    assert len({text[text.find("weights have") :][:80] for text in texts}) == 1, texts
    return str(texts[0])


def by_tape(fault: Fault, graph: bool, *, local: bool = False) -> str:
    """Train by a new tape in each step, on the data of each rank, with a rate of 0."""
    kernels = [tf.Variable(np.ones((3, 2), np.float32), name="kernel") for _ in range(SIZE)]
    others = [tf.Variable([1.0 * rank * local]) for rank in range(SIZE)]

    def main(rank: int) -> None:
        kernel, other = kernels[rank], others[rank]

        def step(x: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.matmul(x, kernel) ** 2) + tf.reduce_sum(other)
            tape = hvd.DistributedGradientTape(tape)
            if local:
                tape.register_local_source(other)
            gradients = tape.gradient(loss, [kernel, other])
            kernel.assign_sub(0.0 * gradients[0])

        run = tf.function(step) if graph else step
        for number in range(1, STEPS + 1):
            if rank == 1:
                fault(number, kernel)
            run(tf.ones((2, 3)) * (rank + number))

    return told(main)


def one_ulp(at: int) -> Fault:
    def fault(step: int, kernel: Any) -> None:
        if step == at:
            value = kernel.numpy()
            value[2, 1] = np.nextafter(value[2, 1], np.float32(9))
            kernel.assign(value)

    return fault


@pytest.mark.parametrize("graph", [False, True])
def test_tapes(graph: bool) -> None:
    assert by_tape(lambda *_: None, graph) == ""
    text = by_tape(one_ulp(4), graph)
    assert "weights have diverged at step 6: ranks 0 and 1 differ" in text
    assert "in 1 of 2 tensors, first in 'weights.0.kernel': element [2, 1] is 1.0 on rank" in text
    assert "They were equal after step 3" in text
    assert "at step 2" in by_tape(one_ulp(1), graph)
    assert by_tape(lambda *_: None, graph, local=True) == ""


@pytest.mark.parametrize(
    ("options", "resource"),
    [
        ({}, True),
        ({}, False),
        ({"op": hvd.Adasum}, True),
        ({"backward_passes_per_step": 2}, True),  # Others cannot be stepped over in a branch.
    ],
)
def test_optimizers_of_sessions(options: dict[str, Any], resource: bool) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def train(at: int, what: str) -> str:
        def main(rank: int) -> None:
            with tf.Graph().as_default(), v1.Session() as session:
                kernel = v1.Variable(np.ones((3, 2), np.float32), name="k", use_resource=resource)
                factor = v1.placeholder(tf.float32)
                optimizer = hvd.DistributedOptimizer(
                    v1.train.MomentumOptimizer(0.0, 0.9), **options
                )
                operation = optimizer.minimize(tf.reduce_sum(kernel**2) * factor)
                changed = {"weight": kernel, "state": optimizer.get_slot(kernel, "momentum")}[what]
                change = v1.assign_add(changed, np.eye(3, 2, dtype=np.float32))
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                for number in range(1, STEPS + 1):
                    if (rank, number) == (1, at):
                        session.run(change)
                    for _ in range(passes):
                        session.run(operation, {factor: rank + 1.0})

        return told(main)

    assert train(0, "weight") == ""
    text = train(4, "weight")
    assert "diverged at step 6: ranks 0 and 1 differ" in text
    assert "'weights.0.k': element [0, 0] is 1.0 on rank 0 and 2.0 on rank 1" in text
    text = train(4, "state")
    if options.get("op") == hvd.Adasum:
        assert text == "", "steps of Adasum have a state of their own"
    else:
        assert "at step 6" in text and "first in 'state.0.k/Momentum'" in text
