"""Training on three ranks, against a process that has the data of all."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hvdlite.jax as hvd
from hvdlite.jax.calls import Call
from hvdlite.jax.native.executions import Registered
from hvdlite.tools.timeline_reader import read_events
from tests.jax.cases import RANKS, Case, Outcomes, same, values
from tests.ranks import run_ranks

ROWS, STEPS = 8, 4
RNG = np.random.default_rng(0)
INPUTS = RNG.normal(size=(ROWS * RANKS, 4)).astype(np.float32)
TARGETS = RNG.normal(size=(ROWS * RANKS, 3)).astype(np.float32)
PARAMS = {
    "first": {"w": RNG.normal(size=(4, 5)).astype(np.float32), "b": np.zeros(5, np.float32)},
    "last": RNG.normal(size=(5, 3)).astype(np.float32),
}


def loss(params: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ params["first"]["w"] + params["first"]["b"])
    return jnp.mean((hidden @ params["last"] - targets) ** 2)


def train(
    optimizers: Mapping[str, Any],
    rows: Any,
    gradients: Any = jax.value_and_grad,
    compiled: bool = True,
) -> Any:
    """Train once with each optimizer on some rows of the data; return all parameters.

    Their steps are one program, in which collectives of several optimizers have the same names.
    """

    def step(params: Any, states: Any, inputs: Any, targets: Any) -> tuple[Any, Any]:
        stepped, following = {}, {}
        for name, optimizer in optimizers.items():
            _, found = gradients(loss)(params[name], inputs, targets)
            updates, following[name] = optimizer.update(found, states[name], params[name])
            stepped[name] = optax.apply_updates(params[name], updates)
        return stepped, following

    made = jax.jit(step, donate_argnums=(0, 1)) if compiled else step
    params = {name: jax.tree_util.tree_map(jnp.array, PARAMS) for name in optimizers}
    states = {name: optimizer.init(params[name]) for name, optimizer in optimizers.items()}
    for _ in range(STEPS):
        params, states = made(params, states, INPUTS[rows], TARGETS[rows])
    return params


def train_one(optimizer: Any, rows: Any, *args: Any) -> Any:
    return train({"one": optimizer}, rows, *args)["one"]


def of(rank: int) -> slice:
    return slice(ROWS * rank, ROWS * (rank + 1))


ALL = slice(None)
ADAM = partial(optax.adamw, 1e-2)
SGD = partial(optax.sgd, 1e-1)
# What makes a distributed optimizer, and the optimizer that one process has.
OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "adam": (lambda: hvd.DistributedOptimizer(ADAM()), ADAM),
    "sum": (
        lambda: hvd.DistributedOptimizer(optax.sgd(1e-1 / RANKS), op=hvd.Sum),
        SGD,
    ),
    "predivided": (
        lambda: hvd.DistributedOptimizer(SGD(), gradient_predivide_factor=2.0),
        SGD,
    ),
    "groups": (lambda: hvd.DistributedOptimizer(ADAM(), groups=2), ADAM),
    "named groups": (
        lambda: hvd.DistributedOptimizer(ADAM(), groups=[["['last']", "['first']['b']"]]),
        ADAM,
    ),
    "segments": (lambda: hvd.DistributedOptimizer(ADAM(), segmentation="size:80,20"), ADAM),
    "passes": (
        lambda: hvd.DistributedOptimizer(SGD(), backward_passes_per_step=2),
        lambda: optax.MultiSteps(SGD(), 2, use_grad_mean=False),
    ),
    "mean of passes": (
        lambda: hvd.DistributedOptimizer(
            SGD(), backward_passes_per_step=2, average_aggregated_gradients=True
        ),
        lambda: optax.MultiSteps(SGD(), 2),
    ),
    "clipped": (
        lambda: hvd.DistributedOptimizer(optax.chain(optax.clip_by_global_norm(0.1), SGD())),
        lambda: optax.chain(optax.clip_by_global_norm(0.1), SGD()),
    ),
    "fp16": (lambda: hvd.DistributedOptimizer(SGD(), compression=hvd.Compression.fp16), SGD),
}


COMPILED = {name: make for name, (make, _) in OPTIMIZERS.items()}
NOW = {name: COMPILED[name] for name in ("adam", "passes")}


def made(optimizers: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
    return {name: make() for name, make in optimizers.items()}


def compressed(rank: int) -> Any:
    """Both what ranks have in the end, and what rank 0 has."""
    optimizer = hvd.DistributedOptimizer(SGD(), compression=hvd.Compression.topk(0.1))
    params = train_one(optimizer, of(rank))
    return params, hvd.broadcast_parameters(params)


def passes(rank: int) -> Any:
    """Two passes with parts of a gradient, and one with their sum: what comes of both is equal."""
    parts = [jax.tree_util.tree_map(lambda w, k=k: w * (k + rank + 1), PARAMS) for k in range(6)]
    found = {}
    for count, given in ((2, parts), (1, [_sum(*parts[k : k + 2]) for k in (0, 2, 4)])):
        compression = hvd.Compression.topk(0.1)
        optimizer = hvd.DistributedOptimizer(SGD(), compression, backward_passes_per_step=count)
        update, state = jax.jit(optimizer.update), optimizer.init(PARAMS)
        steps, started = [], []
        start = Registered.start

        def counting(self: Any, *args: Any, start: Any = start, started: Any = started) -> Any:
            started.append(self.names)
            return start(self, *args)

        with patch.object(Registered, "start", counting):
            for gradients in given:
                updates, state = update(gradients, state)
                steps.append(jax.block_until_ready(updates))
        left = optimizer.compression_state()["residuals"]
        found[count] = {"steps": steps[count - 1 :: count], "left": [*left.values()]}
        found[count]["started"] = len(started)
    return found


def _sum(one: Any, other: Any) -> Any:
    return jax.tree_util.tree_map(jnp.add, one, other)


def unsent_comes_back(folder: Path) -> Any:
    """What is left after a step that was saved, three times: then, by elastic state, by files."""
    optimizer = hvd.DistributedOptimizer(SGD(), compression=hvd.Compression.topk(0.1))
    train_one(optimizer, of(hvd.rank()))
    left = optimizer.compression_state()["residuals"]
    state = hvd.elastic.JaxState(optimizer=optimizer, step=0)
    hvd.checkpoint.save(folder, {"optimizer": optimizer})
    train_one(optimizer, of(hvd.rank()))
    changed = optimizer.compression_state()["residuals"]
    state.restore()
    restored = optimizer.compression_state()["residuals"]
    another = hvd.DistributedOptimizer(SGD(), compression=hvd.Compression.topk(0.1))
    hvd.checkpoint.load(folder, {"optimizer": another})
    return left, changed, restored, another.compression_state()["residuals"]


def traced(rank: int) -> Any:
    """Three steps: the bytes that each has reduced, and whether its reductions are within it."""
    optimizer = hvd.DistributedOptimizer(SGD())
    params, state = PARAMS, optimizer.init(PARAMS)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        found = jax.grad(loss)(params, INPUTS, TARGETS)
        updates, state = optimizer.update(found, state, params)
        return optax.apply_updates(params, updates), state

    with hvd.trace_iterations() as trace:
        for _ in range(3):
            with trace.iteration():
                params, state = jax.block_until_ready(step(params, state))
        return [
            (
                sum(each.bytes for each in row.segments),
                all(row.fp_start < each.end < row.iteration_end for each in row.segments),
            )
            for row in trace.rows()
        ]


def recorded(rank: int, path: Path) -> Any:
    """Three steps of which there is a timeline, and progress."""
    optimizer = hvd.DistributedOptimizer(SGD())
    params, state = PARAMS, optimizer.init(PARAMS)

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        return optimizer.update(jax.grad(loss)(params, INPUTS, TARGETS), state, params)[1]

    hvd.barrier()
    hvd.start_timeline(str(path))
    for number in range(3):
        state = jax.block_until_ready(step(params, state))
        hvd.progress(3, number + 1)
    metrics = hvd.metrics()
    hvd.stop_timeline()
    events = [] if rank else read_events(str(path))
    reduced = sum(each["args"]["bytes"] for each in events if "names" in each.get("args", ()))
    return metrics["progress_steps"], metrics["progress_total_steps"], reduced


def sliced(rank: int) -> Any:
    batch = jnp.arange(6.0).reshape(6, 1)
    return hvd.data.slice_batch({"x": batch})["x"]


def on_a_process_set(rank: int) -> Any:
    members = hvd.add_process_set([0, 2])
    if rank == 1:
        return PARAMS
    return train_one(hvd.DistributedOptimizer(SGD(), process_set=members), of(rank))


def adasum(rank: int) -> Any:
    return [
        train_one(
            hvd.DistributedOptimizer(SGD(), op=hvd.Adasum), of(rank), jax.value_and_grad, compiled
        )
        for compiled in (True, False)
    ]


def started_alike(rank: int) -> Any:
    tree = {"w": jnp.full(3, rank), "key": jax.random.key(rank), "name": "a"}
    found = hvd.broadcast_parameters(tree, root_rank=1)
    return {**found, "key": jax.random.key_data(found["key"]), "name": found["name"] == "a"}


def of_other_dtypes(rank: int) -> dict[str, Any]:
    """Leaves of dtypes that only broadcasts have."""
    return {
        "int4": jnp.full(3, rank, "int4"),
        "float8": jnp.full((), rank, "float8_e4m3fn"),
        "text": np.str_(f"rank {rank}"),
        "texts": np.array([["a", f"bc{rank}"]]),
        "date": np.datetime64("2020-01-01") + np.timedelta64(rank, "D"),
        "swapped": np.full((2, 1), rank, ">f4"),
    }


def of_integers(rank: int) -> Any:
    """Gradients of parameters some of which are integers, compiled and not."""
    params = {"a": jnp.arange(3), "b": jnp.full(2, 1.0), "c": jnp.int32(4)}
    of = hvd.grad(lambda params: ((rank + 1) * params["b"]).sum(), allow_int=True)
    compiled = jax.jit(lambda params: of(params)["b"])(params)
    found = of(params)
    return compiled, found["b"], [found[name].dtype == jax.dtypes.float0 for name in ("a", "c")]


def saved_and_loaded(folder: Path) -> Any:
    optimizer = optax.adam(1e-3)
    params = {"w": jnp.arange(4.0)}
    _, state = optimizer.update({"w": jnp.ones(4)}, optimizer.init(params))
    key = jax.random.key(5)
    hvd.checkpoint.save(folder, {"params": params, "state": state, "key": key, "step": 7})
    empty = {"w": jnp.zeros(4)}
    begun = {"params": empty, "state": optimizer.init(empty), "key": jax.random.key(0), "step": 0}
    found = hvd.checkpoint.load(folder, begun)
    assert type(found["state"]) is type(state) and type(found["state"][0]) is type(state[0])
    # One process reads what three have written; another framework does, too.
    wanted = {"params": {"w": np.zeros(4, np.float32)}}
    other = import_module("hvdlite.numpy").checkpoint.load(folder, wanted)
    return {**found, "key": jax.random.key_data(found["key"]), "numpy": other["params"]["w"]}


def cases(folder: Path) -> dict[str, Case]:
    return {
        "trained": lambda rank: train(made(COMPILED), of(rank)),
        "trained now": lambda rank: train(made(NOW), of(rank), jax.value_and_grad, False),
        "gradients": lambda rank: train_one(ADAM(), of(rank), hvd.value_and_grad),
        "compressed": compressed,
        "in passes": passes,
        "unsent": lambda rank: unsent_comes_back(folder / "unsent"),
        "traced": traced,
        "recorded": lambda rank: recorded(rank, folder / "timeline.json"),
        "sliced": sliced,
        "set": on_a_process_set,
        "adasum": adasum,
        "start": started_alike,
        "bytes": lambda rank: hvd.broadcast_parameters(of_other_dtypes(rank), root_rank=1),
        "integers": of_integers,
        "checkpoint": lambda rank: saved_and_loaded(folder / "checkpoint"),
    }


@pytest.fixture(scope="module")
def alone() -> Any:
    """What one process comes to that has the data of all."""
    return train({name: make() for name, (_, make) in OPTIMIZERS.items()}, ALL)


@pytest.mark.parametrize(
    ("how", "name"),
    [("trained", name) for name in COMPILED] + [("trained now", name) for name in NOW],
)
def test_an_optimizer(outcomes: Outcomes, alone: Any, how: str, name: str) -> None:
    for found in values(outcomes, how):
        same(found[name], alone[name], 1e-3 if name == "fp16" else 2e-5)


def test_gradients_of_all_ranks(outcomes: Outcomes, alone: Any) -> None:
    for found in values(outcomes, "gradients"):
        same(found, alone["adam"], 2e-5)


def test_compression_keeps_ranks_equal_and_is_no_plain_sum(outcomes: Outcomes, alone: Any) -> None:
    for own, first in values(outcomes, "compressed"):
        same(own, first, 0)
        assert not np.allclose(own["last"], alone["sum"]["last"], atol=1e-6)


def test_passes_exchange_once_what_one_pass_would(outcomes: Outcomes) -> None:
    for found in values(outcomes, "in passes"):
        assert found[2]["started"] == found[1]["started"] > 0
        same(found[2]["steps"], found[1]["steps"])
        same(found[2]["left"], found[1]["left"])


def test_what_was_not_sent_is_saved(outcomes: Outcomes) -> None:
    found = values(outcomes, "unsent")
    for left, changed, restored, loaded in found:
        same(restored, left, 0)
        same(loaded, left, 0)
        (name,) = (each for each in left if each.endswith("['last']"))
        assert np.any(left[name]) and not np.allclose(left[name], changed[name])
    assert not np.allclose(found[0][0][name], found[1][0][name]), "each rank has its own"


def test_steps_are_traced(outcomes: Outcomes) -> None:
    nbytes = sum(each.nbytes for each in jax.tree_util.tree_leaves(PARAMS))
    for found in values(outcomes, "traced"):
        assert [(int(size), bool(within)) for size, within in found] == [(nbytes, True)] * 3


def test_steps_are_in_the_timeline_and_progress_in_the_metrics(outcomes: Outcomes) -> None:
    nbytes = sum(each.nbytes for each in jax.tree_util.tree_leaves(PARAMS))
    found = [tuple(map(int, each)) for each in values(outcomes, "recorded")]
    assert [each[:2] for each in found] == [(3, 3)] * RANKS
    # The first step may be on its way already when the timeline begins.
    assert found[0][2] in (2 * nbytes, 3 * nbytes) and found[1][2] == found[2][2] == 0


def test_a_batch_is_cut(outcomes: Outcomes) -> None:
    for rank, found in enumerate(values(outcomes, "sliced")):
        np.testing.assert_array_equal(found, [[2 * rank], [2 * rank + 1]])


def test_adasum_is_the_same_compiled_and_not(outcomes: Outcomes) -> None:
    for compiled, now in values(outcomes, "adasum"):
        same(compiled, now, 1e-5)


def test_a_process_set_trains_alone(outcomes: Outcomes) -> None:
    rows = np.r_[of(0), of(2)]
    found = values(outcomes, "set")
    for rank in (0, 2):
        same(found[rank], train_one(SGD(), rows), 2e-5)
    same(found[1], PARAMS, 0)


def test_parameters_of_one_rank_reach_all(outcomes: Outcomes) -> None:
    for found in values(outcomes, "start"):
        assert found["name"]
        np.testing.assert_array_equal(found["w"], [1, 1, 1])
        np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(1)))


def test_parameters_of_every_dtype_reach_all(outcomes: Outcomes) -> None:
    for found in values(outcomes, "bytes"):
        for name, wanted in of_other_dtypes(1).items():
            assert found[name].dtype.name == wanted.dtype.name
            np.testing.assert_array_equal(found[name], wanted)


def test_gradients_of_integers_stay_as_they_are(outcomes: Outcomes) -> None:
    for compiled, now, are_kept in values(outcomes, "integers"):
        np.testing.assert_array_equal(compiled, [2, 2])  # The average of 1, 2 and 3.
        np.testing.assert_array_equal(now, [2, 2])
        assert are_kept == [True, True]


def test_a_checkpoint_has_states_of_optax_and_keys(outcomes: Outcomes) -> None:
    for found in values(outcomes, "checkpoint"):
        assert found["step"] == 7
        np.testing.assert_array_equal(found["params"]["w"], np.arange(4))
        np.testing.assert_array_equal(found["numpy"], np.arange(4))
        np.testing.assert_array_equal(found["key"], jax.random.key_data(jax.random.key(5)))
        np.testing.assert_allclose(found["state"][0].mu["w"], np.full(4, 0.1), rtol=1e-6)


@pytest.mark.parametrize("layers", [["Dense_0", "Dense_1"], ["mlp/~/linear_0", "mlp/~/linear_1"]])
def test_layers_of_flax_and_haiku_are_whole_segments(layers: list[str]) -> None:
    grads = {layer: {"b": jnp.ones(2), "w": jnp.ones((2, 2))} for layer in layers}
    sent = []

    def call(*args: Any, **options: Any) -> Any:
        sent.append([int(name.split(".")[1]) for name in options["names"]])
        return Call(*args, **options)

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(SGD(), segmentation="mb:-1")
        optimizer.update(grads, optimizer.init(grads), grads)

    with patch("hvdlite.jax.gradients.Call", call):
        run_ranks(2, main)
    assert sorted(sent) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_what_an_optimizer_refuses() -> None:
    with pytest.raises(ValueError, match="backward_passes_per_step must be at least 1, not 0"):
        hvd.DistributedOptimizer(SGD(), backward_passes_per_step=0)
    with pytest.raises(ValueError, match=r"groups must consist of lists of path of a leaf"):
        hvd.DistributedOptimizer(SGD(), groups=[[3]])
    with pytest.raises(ValueError, match="give it to a DistributedOptimizer"):
        hvd.grad(loss, compression=hvd.Compression.topk(0.1))
