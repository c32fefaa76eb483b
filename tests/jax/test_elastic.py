"""States of JAX in elastic jobs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hvdlite.jax as hvd
from hvdlite.common.base.errors import HostsUpdatedInterrupt
from hvdlite.common.base.host_update import HostUpdateResult
from hvdlite.jax import elastic as elastic_state
from hvdlite.jax.native import executions
from hvdlite.jax.starting import Started, start_now
from tests.jax.cases import Case, Outcomes, same, values
from tests.limits import HANG_SECONDS

SCRIPT = """
import json, os, signal, sys
from functools import partial
from pathlib import Path
import jax, jax.numpy as jnp, optax
import hvdlite.jax as hvd

hvd.init()
divided = "divided" in sys.argv
optimizer = hvd.DistributedOptimizer(optax.sgd(0.1, momentum=0.5), shard_state=divided)
killed = Path("killed")

@partial(jax.jit, donate_argnums=(0, 1))
def step(params, state, inputs):
    found = jax.grad(lambda params: (inputs @ params).sum())(params)
    updates, state = optimizer.update(found, state, params)
    return optax.apply_updates(params, updates), state

@hvd.elastic.run
def train(state):
    while state.step < 6:
        if state.step == 3 and hvd.rank() == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = jnp.full((1, 4), float(hvd.rank()))
        state.params, state.opt = step(state.params, state.opt, inputs)
        jax.block_until_ready(state.params)
        state.step += 1
        state.commit()

params = jnp.zeros(4)
state = hvd.elastic.JaxState(params=params, opt=optimizer.init(params), step=0)
train(state)
Path(f"rank{hvd.rank()}").write_text(json.dumps([hvd.size(), state.params.tolist()]))
"""


def grown(rank: int) -> Any:
    """Rank 0 is a survivor, whose attributes have grown; the others begin."""

    def apply() -> int:
        return rank

    optimizer = hvd.DistributedOptimizer(optax.sgd(0.1))
    state = hvd.elastic.JaxState(
        log=[], step=0, best=None, model={"w": jnp.full(2, rank), "seen": [], "tx": optimizer},
        bound=jax.tree_util.Partial(apply),
    )  # fmt: skip
    if rank == 0:
        state.log, state.step, state.best = [1, 2], 7, 0.5
        state.model = {**state.model, "seen": [(3, None)]}
        state.save()
    state.sync()
    assert state.model["tx"] is optimizer and state.bound() == rank, "a rank's own are kept"
    assert state.best == 0.5 and state.model["seen"] == [(3, None)]
    return state.log, state.step, state.model["w"]


def with_longer_arrays(rank: int) -> Any:
    """Rank 0 is a survivor, whose arrays have grown since; the others begin."""
    tree = {"seen": jnp.zeros(2), "host": np.zeros(3), "same": jnp.full(2, rank)}
    state = hvd.elastic.JaxState(
        buffers=tree, history=[], keys=jax.random.key(rank), other=jnp.full(3, rank)
    )
    if rank == 0:
        state._commit_number = 4
        state.buffers = {**tree, "seen": jnp.arange(5.0), "new": jnp.arange(2), "host": np.ones(4)}
        state.history = [jnp.ones(2), np.float32(2.5), jax.random.key(7)]
        state.keys = jax.random.split(jax.random.key(5), 3)
        state.save()
    for given_away in (state.keys, state.other, state.buffers["seen"]):
        given_away.delete()
    state.sync()
    changed = state.buffers["seen"] + 1
    state.buffers = {"seen": changed}
    state.restore()
    assert isinstance(state.buffers["host"], np.ndarray)
    assert isinstance(state.buffers["new"], jax.Array)
    first, second, key = state.history
    keys = jax.random.key_data(key), jax.random.key_data(state.keys)
    return state.buffers, first, second, keys, state.other


def with_other_arrays(rank: int) -> Any:
    """No rank has a commit: what differs was made differently."""
    hvd.elastic.JaxState(model={"w": jnp.zeros(2 + rank)}).sync()


def cases(folder: Path) -> dict[str, Case]:
    return {"grown": grown, "longer": with_longer_arrays, "other arrays": with_other_arrays}


def test_newcomers_get_attributes_that_have_grown(outcomes: Outcomes) -> None:
    for log, step, w in values(outcomes, "grown"):
        assert ([*map(int, log)], int(step), w.tolist()) == ([1, 2], 7, [0, 0])


def test_newcomers_get_arrays_that_have_grown(outcomes: Outcomes) -> None:
    key = jax.random.key_data(jax.random.key(7))
    keys = jax.random.key_data(jax.random.split(jax.random.key(5), 3))
    buffers = {"seen": np.arange(5.0), "host": np.ones(4), "same": np.zeros(2), "new": np.arange(2)}
    for found in values(outcomes, "longer"):
        same(found, (buffers, np.ones(2), np.float32(2.5), (key, keys), np.zeros(3)), 0)


def test_arrays_that_differ_from_the_beginning_are_named(outcomes: Outcomes) -> None:
    text = (
        "tensor '['model']['w']' is float32 of shape (2,) on rank 0 and float32 of shape (3,) on "
        "rank 1"
    )
    for outcome in outcomes:
        assert text in outcome["other arrays"].text


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


def test_a_save_that_fails_changes_nothing(state: hvd.elastic.JaxState) -> None:
    gone = jnp.ones(3)
    state.opt = jax.tree_util.tree_map(lambda leaf: leaf + 1, state.opt)
    state.params, state.step = {"w": gone}, 6
    gone.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        state.save()
    state.restore()
    assert (state.step, int(state.opt[0].count)) == (0, 0)
    np.testing.assert_array_equal(state.params["w"], np.arange(3))


def test_what_a_state_refuses() -> None:
    with pytest.raises(ValueError, match=r"a method save\(\)"):
        hvd.elastic.JaxState(save=1)
    with pytest.raises(TypeError, match=r"'gate' is a .*lock, which cannot be copied"):
        import threading

        hvd.elastic.JaxState(gate=threading.Lock())


@pytest.mark.parametrize("own", [True, False], ids=["its own program", "one of another thread"])
def test_hosts_change_when_programs_have_ended(state: hvd.elastic.JaxState, own: bool) -> None:
    """A program with a collective runs until the test lets it end."""
    running, may_end, interrupted = threading.Event(), threading.Event(), threading.Event()
    log: list[str] = []

    def hold(call: Any, inputs: Any, results: Any) -> Started:
        running.set()
        assert may_end.wait(HANG_SECONDS)
        log.append("the program has ended")
        return start_now(call, inputs, results)

    def run_program() -> None:
        square = jnp.ones((512, 512))
        jax.jit(lambda x: hvd.allreduce((square @ square @ x)[0], name="held"))(square)

    def see_hosts() -> None:
        if own:
            run_program()
        with pytest.raises(HostsUpdatedInterrupt):
            state._interrupt(HostUpdateResult.added)
        log.append("the hosts change")
        interrupted.set()

    hvd.init()
    try:
        thread = threading.Thread(target=see_hosts, daemon=True)
        with patch.object(executions, "start_now", hold):
            if not own:
                run_program()
            thread.start()
            assert running.wait(HANG_SECONDS)
            assert not interrupted.wait(0.3), "it has not waited"
            may_end.set()
            thread.join(HANG_SECONDS)
    finally:
        may_end.set()
        hvd.shutdown()
    assert log == ["the program has ended", "the hosts change"]


@pytest.mark.soak  # Three processes start, and compile their programs twice.
@pytest.mark.parametrize("how", ["whole", "divided"])
def test_programs_go_on_without_a_rank_that_was_killed(tmp_path: Path, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = [sys.executable, "-m", "hvdlite.launcher", "-np", "3", "--min-np", "2"]
    done = subprocess.run(
        [*launcher, sys.executable, "script.py", how], cwd=tmp_path, capture_output=True, text=True,
        timeout=HANG_SECONDS, check=False, env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # The mean over the ranks is 1 in three steps, and 0.5 in three.
    wanted = momentum = 0.0
    for gradient in [1.0] * 3 + [0.5] * 3:
        momentum = gradient + 0.5 * momentum
        wanted -= 0.1 * momentum
    for rank in range(2):
        size, params = json.loads((tmp_path / f"rank{rank}").read_text())
        assert size == 2 and params == pytest.approx([wanted] * 4)


def test_a_sync_that_loses_its_root_halfway_leaves_the_last_save(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Arrays had come, and objects had not: they are of two commits."""

    def lost(*_: Any) -> None:
        raise hvd.HorovodInternalError("rank 2 is lost", rank=2)

    state = hvd.elastic.JaxState(w=jnp.full(3, 5.0), step=5)
    monkeypatch.setattr(state, "_bcast_object", lost)
    monkeypatch.setattr(elastic_state, "allgather_object", lambda obj, *_: [obj, obj])
    monkeypatch.setattr(elastic_state, "rank", lambda: 0)
    monkeypatch.setattr(
        elastic_state, "broadcast_arrays", lambda arrays, *_: [np.full_like(a, 6) for a in arrays]
    )
    with pytest.raises(hvd.HorovodInternalError):
        state.sync()
    state.restore()
    assert state.step == 5 and state.w.tolist() == [5.0] * 3
