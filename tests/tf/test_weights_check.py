"""HVDLITE_CHECK_WEIGHTS with tapes, eagerly and in graphs, and with optimizers of sessions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.gradients.weights_check import VariablesCheck
from hvdlite.common.settings.config import Config
from hvdlite.tf.variables import compare_variables
from tests.ranks import run_ranks

v1 = tf.compat.v1
SIZE, STEPS = 2, 8
CHECKED = Config(check_weights=3)  # Optimizers also after the second step.
Fault = Callable[[int, Any], None]  # (step, kernel)


def told(main: Callable[[int], None], size: int = SIZE) -> str:
    """What all ranks are told; empty where nothing has diverged."""

    def run(rank: int) -> str:
        try:
            main(rank)
        except (RuntimeError, tf.errors.OpError) as error:
            return str(error)
        return ""

    texts = run_ranks(size, run, config=CHECKED)
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
    assert "at step 3" in by_tape(one_ulp(1), graph)
    assert by_tape(lambda *_: None, graph, local=True) == ""


def ask(variable: Any, **options: Any) -> None:
    """Ask for a gradient by a new tape."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable)
    hvd.DistributedGradientTape(tape, **options).gradient(loss, variable)


def test_several_tapes_before_the_broadcast() -> None:
    """As of a loss for each of two networks that have a variable in common."""
    variables = [tf.Variable([1.0 * rank]) for rank in range(SIZE)]

    def main(rank: int) -> None:
        ask(variables[rank])
        ask(variables[rank])
        hvd.broadcast_variables([variables[rank]], root_rank=0)
        for _ in range(STEPS):
            ask(variables[rank])

    assert told(main) == ""


def test_tapes_of_several_process_sets() -> None:
    """Each pair of ranks agrees, and the pairs differ, which the tape over all ranks finds."""
    variables = [tf.Variable([1.0 * (rank // 2)]) for rank in range(4)]

    def main(rank: int) -> None:
        pairs = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
        for _ in range(3):
            ask(variables[rank], process_set=pairs[rank // 2])
        for _ in range(3):
            ask(variables[rank])

    assert "at step 3: ranks 0, 1, 2 and 3 differ" in told(main, size=4)


@pytest.mark.parametrize("of_tape", [False, True])
def test_an_optimizer_counts_anew_over_old_variables(of_tape: bool) -> None:
    """As of a Keras model that is compiled again, before the broadcast; tapes go on counting."""
    variables = [tf.Variable([1.0]) for _ in range(SIZE)]

    def main(rank: int) -> list[bool]:
        reducer = hvd.DistributedGradientTape(tf.GradientTape())._reducer
        due: list[bool] = []
        for _ in range(2):
            check = VariablesCheck(
                reducer, lambda each, *_: due.append(each.is_due()), of_tape=of_tape
            )
            check.step([variables[rank]])
            check.step([variables[rank]])
        return due

    expected = [False, False, True, False] if of_tape else [False, True, False, True]
    assert run_ranks(SIZE, main, config=CHECKED) == [expected] * SIZE


def test_nothing_is_listed_without_the_setting() -> None:
    class Untouched:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} costs time in each step")

    reducer: Any = Untouched()
    assert VariablesCheck(reducer, compare_variables, of_tape=True).step([None]) is None


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_variables_that_are_no_resources_are_read_after_the_step(op: int) -> None:
    """By the edges of the graph: where memory is shared, an earlier read may show new values."""

    def before(operation: Any) -> set[str]:
        seen, todo = {operation}, [operation]
        while todo:
            each = todo.pop()
            others = {tensor.op for tensor in each.inputs}.union(each.control_inputs) - seen
            seen |= others
            todo += others
        return {each.type for each in seen}

    def main(rank: int) -> None:
        with tf.Graph().as_default() as graph:
            kernel = v1.Variable([[1.0, 2.0]], name="k", use_resource=False)
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(0.1), op=op)
            optimizer.minimize(tf.reduce_sum(kernel**2))
            (branch,) = (each for each in graph.get_operations() if each.type == "If")
            reads = [tensor for tensor in branch.inputs if tensor.dtype == tf.float32]
            assert len(reads) == 1 and "ApplyGradientDescent" in before(reads[0].op)

    assert told(main) == ""


@pytest.mark.parametrize(
    ("options", "resource"),
    [
        ({}, True),
        ({}, False),
        ({"op": hvd.Adasum}, True),
        ({"op": hvd.Adasum}, False),
        ({"backward_passes_per_step": 2}, True),  # Others cannot be stepped over in a branch.
    ],
)
def test_optimizers_of_sessions(options: dict[str, Any], resource: bool) -> None:
    passes = options.get("backward_passes_per_step", 1)

    def train(at: int, what: str) -> str:
        def main(rank: int) -> None:
            # A state that differs would make weights differ, too.
            rate = 0.0 if resource or what == "state" else 0.125
            with tf.Graph().as_default(), v1.Session() as session:
                kernel = v1.Variable(np.ones((3, 2), np.float32), name="k", use_resource=resource)
                factor = v1.placeholder(tf.float32)
                optimizer = hvd.DistributedOptimizer(
                    v1.train.MomentumOptimizer(rate, 0.9), **options
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
    values = "1.0 on rank 0 and 2.0 on rank 1" if resource else ""
    assert f"'weights.0.k': element [0, 0] is {values}" in text
    text = train(4, "state")
    if options.get("op") == hvd.Adasum:
        assert text == "", "steps of Adasum have a state of their own"
    else:
        assert "at step 6" in text and "first in 'state.0.k/Momentum'" in text
