"""Functions of Python that programs call: in order, with their errors, and waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hvdlite.jax.calls import Kind
from hvdlite.jax.order import wait_for_programs
from hvdlite.jax.python_calls import call_python

ROW = Kind((3,), np.dtype(np.float32))


def program_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """A program that calls it with an array, and adds 1 to what it returns."""
    return jax.jit(lambda x: call_python(function, [ROW], x)[0] + 1)  # type: ignore[no-any-return]


def test_programs_call_in_the_order_of_the_script() -> None:
    seen: list[float] = []

    def note(array: Any) -> list[Any]:
        assert type(array) is np.ndarray
        seen.append(float(array[0]))
        return [10 * array]

    def twice(x: Any) -> Any:
        (first,) = call_python(note, [ROW], x)
        call_python(note, [ROW], x + 0.5)  # It is called, though nobody uses what it returns.
        return jax.lax.fori_loop(0, 2, lambda _, y: call_python(note, [ROW], y)[0], first)

    program = jax.jit(twice)
    results = [program(jnp.full(3, float(number))) for number in (1, 2)]
    assert [each.tolist() for each in results] == [[1000.0] * 3, [2000.0] * 3]
    assert seen == [1.0, 1.5, 10.0, 100.0, 2.0, 2.5, 20.0, 200.0]


def test_an_error_is_that_of_its_program_alone() -> None:
    def fail(_: Any) -> list[Any]:
        raise KeyError("no such thing")

    with pytest.raises(jax.errors.JaxRuntimeError, match="no such thing"):
        jax.block_until_ready(program_of(fail)(jnp.ones(3)))
    assert program_of(lambda array: [array])(jnp.ones(3)).tolist() == [2.0] * 3


def test_a_wait_for_programs_is_one_for_what_they_call() -> None:
    waited = threading.Event()
    too_early: list[bool] = []

    def step(array: Any) -> list[Any]:
        too_early.append(waited.wait(0.2))  # As long as nobody waits for the step.
        return [array]

    program_of(step)(jnp.ones(3))
    wait_for_programs()
    waited.set()
    assert too_early == [False]


def test_it_has_no_gradient() -> None:
    program = program_of(lambda array: [array])
    with pytest.raises(NotImplementedError, match="hvdlite_python"):
        jax.grad(lambda x: program(x).sum())(jnp.ones(3))
