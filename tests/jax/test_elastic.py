"""States of JAX in elastic jobs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hvdlite.jax as hvd


@pytest.fixture
def state() -> hvd.elastic.JaxState:
    params = {"w": jnp.arange(3.0)}
    return hvd.elastic.JaxState(
        params=params, opt=optax.adam(1e-3).init(params), key=jax.random.key(4), step=0, log=[1]
    )


def test_a_state_comes_back_after_its_arrays_were_given_away(state: hvd.elastic.JaxState) -> None:
    step = jax.jit(lambda tree: jax.tree_util.tree_map(lambda x: x + 1, tree), donate_argnums=0)
    state.params, state.opt, state.step = step(state.params), step(state.opt), 5
    state.log.append(2)
    state.key = jax.random.split(state.key)[0]
    state.restore()
    assert (state.step, state.log, type(state.opt[0]).__name__) == (0, [1], "ScaleByAdamState")
    np.testing.assert_array_equal(state.params["w"], np.arange(3))
    assert int(state.opt[0].count) == 0
    np.testing.assert_array_equal(
        jax.random.key_data(state.key), jax.random.key_data(jax.random.key(4))
    )


def test_a_save_holds_what_there_is(state: hvd.elastic.JaxState) -> None:
    state.params = {"w": state.params["w"] * 2}
    state.save()
    state.params = {"w": state.params["w"] * 100}
    state.restore()
    np.testing.assert_array_equal(state.params["w"], [0, 2, 4])


def test_what_a_state_refuses() -> None:
    with pytest.raises(ValueError, match=r"a method save\(\)"):
        hvd.elastic.JaxState(save=1)
    with pytest.raises(TypeError, match=r"'gate' is a .*lock, which cannot be copied"):
        import threading

        hvd.elastic.JaxState(gate=threading.Lock())
