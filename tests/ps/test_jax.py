"""Transformations of optax whose steps servers make: workers and servers as threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402

from hvdlite.jax import ps  # noqa: E402
from hvdlite.jax.ps.optimizer import updater_for  # noqa: E402
from hvdlite.jax.ps.pieces import check_pieces  # noqa: E402
from hvdlite.jax.ps.updater import OptaxUpdater  # noqa: E402
from hvdlite.ps import context  # noqa: E402
from hvdlite.ps.layouts.blocks import Block  # noqa: E402
from hvdlite.ps.layouts.layout import Part  # noqa: E402
from hvdlite.ps.tables.clocks import SYNC, Mode  # noqa: E402
from hvdlite.ps.tables.description import TableDescription, describe_table  # noqa: E402
from tests.ps.cluster import (  # noqa: E402
    Cluster,
    NewCluster,
    in_threads,
    wait_until,
)
from tests.ps.processes import cluster  # noqa: E402
from tests.ps.scripts.jax_steps import (  # noqa: E402
    STEPS,
    gradients_of,
    main,
    new_params,
    train_in_one,
)
from tests.ps.sites import Site  # noqa: E402

WEIGHTS = {"w": jnp.ones(3), "b": jnp.ones((2, 2), jnp.bfloat16)}
Job = Callable[..., list[Any]]


@pytest.fixture
def job(new_cluster: NewCluster, monkeypatch: pytest.MonkeyPatch) -> Job:
    """What runs `body(number, cluster)` in each worker of a cluster, and returns the results."""
    own = threading.local()
    monkeypatch.setattr(context, "role", lambda: "worker")
    monkeypatch.setattr(context, "worker", lambda: own.worker)

    def run(
        optimizer: Any, body: Callable[..., Any], *, whole: bool = False, servers: int = 2,
        workers: int = 2,
    ) -> list[Any]:  # fmt: skip
        updater = partial(updater_for, optimizer, whole=whole)
        made = new_cluster(servers, workers, updater_of=updater)

        def enter(number: int) -> Any:
            own.worker = made.worker(f"worker {number}", number)
            return body(number, made)

        return in_threads(*[partial(enter, number) for number in range(workers)])

    return run


def train(optimizer: Any, number: int, steps: range) -> Any:
    params = optimizer.pull()
    for step in steps:
        params = optimizer.step(gradients_of(params, step, number))
    return params


def leaves_of(*trees: Any) -> Any:
    """The leaves of trees of one structure, beside each other."""
    structures = {jax.tree_util.tree_structure(tree) for tree in trees}
    assert len(structures) == 1
    return zip(*map(jax.tree_util.tree_leaves, trees), strict=True)


def same(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    for one, other in leaves_of(found, wanted):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_allclose(
            np.asarray(one, np.float32), np.asarray(other, np.float32), tolerance, tolerance
        )


@pytest.mark.parametrize(
    ("optimizer", "partition"),
    [
        (optax.sgd(0.1, 0.9, nesterov=True), "element"),
        (optax.adamw(optax.exponential_decay(0.05, 3, 0.5)), "element"),
        (optax.lamb(0.05), "tensor"),
        (optax.adafactor(0.1, min_dim_size_to_factor=4), "tensor"),
    ],
    ids=["sgd", "adamw", "lamb", "adafactor"],
)
def test_sync_is_one_process(optimizer: Any, partition: str, job: Job) -> None:
    def body(number: int, _: Cluster) -> Any:
        served = ps.DistributedOptimizer(optimizer, new_params(), partition=partition)
        params = train(served, number, range(STEPS))
        assert served.finished_steps == STEPS
        return params

    one, other = job(optimizer, body, whole=partition == "tensor")
    same(one, other, 0)
    same(one, train_in_one(optimizer, new_params(), range(STEPS)))


def test_all_begin_with_the_weights_of_the_first(job: Job) -> None:
    def body(number: int, _: Cluster) -> Any:
        params = {"w": np.full(5, number, np.float32)}
        served = ps.DistributedOptimizer(optax.sgd(0.1), params)
        with pytest.raises(ValueError, match=r"gradients of other weights .* optimizer\.pull"):
            served.step(params)
        return served.pull()["w"]

    one, other = job(optax.sgd(0.1), body, servers=1)
    assert isinstance(one, jax.Array) and one.dtype == jnp.float32
    assert one.tolist() == other.tolist() and one.tolist() in ([0.0] * 5, [1.0] * 5)


@pytest.mark.parametrize(
    ("words", "share"),
    [({"mode": "async"}, 1.0), ({"mode": "ssp", "staleness": 1, "scale": "1/W"}, 0.5)],
)
def test_pushes_of_other_modes_are_steps_of_their_own(
    words: dict[str, Any], share: float, job: Job
) -> None:
    """What is pushed here are powers of two, whose sums are exact in any order."""

    def body(number: int, _: Cluster) -> Any:
        served = ps.DistributedOptimizer(optax.sgd(0.5), WEIGHTS, **words)
        served.pull()
        ps.barrier()
        for step in range(4):
            served.step({"w": jnp.full(3, 2.0**step), "b": jnp.full((2, 2), 2.0**number)})
        ps.barrier()
        return served.pull()

    for found in job(optax.sgd(0.5), body):
        assert found["w"].tolist() == [1 - 0.5 * share * 2 * 15] * 3
        assert found["b"].tolist() == [[1 - 0.5 * share * 4 * 3] * 2] * 2


def test_hyperparameters_travel(job: Job) -> None:
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)

    def body(_number: int, _: Cluster) -> Any:
        served = ps.DistributedOptimizer(optimizer, WEIGHTS)
        served.pull()
        with pytest.raises(ValueError, match="no number 'rate' that stays"):
            served.step(WEIGHTS, {"rate": 0.1})
        served.step(WEIGHTS)
        served.step(WEIGHTS, {"learning_rate": 0.25})
        return served.step(WEIGHTS)

    for found in job(optimizer, body):
        same(found, jax.tree_util.tree_map(jnp.zeros_like, WEIGHTS), 0)


def test_after_lost_steps_the_weights_are_pulled_again(job: Job) -> None:
    def body(_number: int, _: Cluster) -> Any:
        served = ps.DistributedOptimizer(optax.sgd(0.25), WEIGHTS)
        served.pull()
        lost = Mock(side_effect=ps.PsRolledBack("a step is lost", 0))
        with patch.object(served._table, "pull", lost), pytest.raises(ps.PsRolledBack):
            served.step(WEIGHTS)
        with pytest.raises(ValueError, match="gradients of other weights"):
            served.step(WEIGHTS)
        return served.step(served.pull())

    (found,) = job(optax.sgd(0.25), body, workers=1)
    same(found, jax.tree_util.tree_map(lambda each: each * 0.75**2, WEIGHTS), 0)


def test_gradients_that_do_not_fit_are_named(job: Job) -> None:
    def body(_number: int, _: Cluster) -> None:
        served = ps.DistributedOptimizer(optax.sgd(0.1), WEIGHTS)
        served.pull()
        with pytest.raises(ValueError, match="gradients have the structure"):
            served.step({"w": jnp.ones(3)})
        with pytest.raises(ValueError, match=r"gradient of \['w'\] has the shape \(2,\)"):
            served.step({**WEIGHTS, "w": jnp.ones(2)})
        for call in (served.step, lambda _: served.pull()):
            with pytest.raises(ValueError, match="needs values, and JAX is tracing"):
                jax.jit(call)(WEIGHTS)
        ps.start("raw", jnp.ones(3))
        for raw in (partial(ps.push, "raw"), lambda _: ps.pull("raw")):
            with pytest.raises(ValueError, match="needs values, and JAX is tracing"):
                jax.jit(raw)(jnp.ones(3))
        assert ps.pull("raw").tolist() == [1.0] * 3

    job(optax.sgd(0.1), body, workers=1)


# -- which transformations servers can step with

NORM = optax.chain(optax.zero_nans(), optax.clip_by_global_norm(1e3), optax.sgd(0.1))
MASKED = optax.adamw(0.1, mask=lambda params: jax.tree_util.tree_map(lambda x: x.ndim > 1, params))
BY_PATH = partial(jax.tree_util.tree_map_with_path, lambda path, _: "'w'" in str(path))
DECAYED = optax.chain(optax.masked(optax.add_decayed_weights(0.1), BY_PATH), optax.sgd(0.1))
LABELED = optax.multi_transform({True: optax.adam(0.1), False: optax.sgd(0.1)}, BY_PATH)
LABELS = optax.multi_transform({"a": optax.sgd(0.1), "b": optax.sgd(1.0)}, {"w": "a", "b": "b"})


@pytest.mark.parametrize("partition", ["element", "tensor"])
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.sgd(optax.warmup_constant_schedule(0.0, 0.1, 5), 0.9), optax.adamw(0.1),
        optax.lion(0.1), optax.rmsprop(0.1, centered=True), optax.adagrad(0.1),
        optax.chain(optax.clip(0.1), optax.zero_nans(), optax.adam(0.1)),
        optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    ],
)  # fmt: skip
def test_what_treats_elements_alone_is_taken(optimizer: Any, partition: str) -> None:
    params = [{"w": jnp.ones((9, 2)), "b": jnp.ones(9)}, jnp.float16(1.0), jnp.ones((3, 0, 2))]
    check_pieces(optimizer, params, "none", whole=partition == "tensor")


@pytest.mark.parametrize(
    ("optimizer", "partition", "said"),
    [
        (NORM, "element", "gives other values .* Clip gradients by their norm before step"),
        (NORM, "tensor", "gives other values .* servers step over each array on its own"),
        (MASKED, "element", "gives other values"),
        (optax.lamb(0.1), "element", "gives other values"),
        (optax.scale_by_factored_rms(), "element", "neither one for each element nor one for all"),
        (optax.apply_if_finite(optax.sgd(0.1), 3), "element", "gives other values"),
        (LABELS, "tensor", "raises"),
        (DECAYED, "element", "depend on the paths"),
        (DECAYED, "tensor", "depend on the paths"),
        (LABELED, "element", "depend on the paths"),
        (LABELED, "tensor", "depend on the paths"),
    ],
)
def test_what_servers_cannot_do_is_refused(optimizer: Any, partition: str, said: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)this transformation of optax.*{said}"):
        ps.DistributedOptimizer(optimizer, WEIGHTS, partition=partition)


@pytest.mark.parametrize(
    ("params", "words", "said"),
    [
        ({"n": jnp.ones(3, jnp.int32)}, {}, r"\['n'\] is int32: servers step over floating-point"),
        (WEIGHTS, {"mode": "fast"}, "mode is 'fast'"),
        (WEIGHTS, {"partition": "row"}, "partition is 'row'"),
        (WEIGHTS, {"op": 4}, "a server averages what is pushed, or adds it up"),
    ],
)
def test_what_cannot_be_is_refused_at_the_call(
    params: Any, words: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        ps.DistributedOptimizer(optax.sgd(0.1), params, **words)


# -- rows of embeddings, and servers that go

COUNT, LENGTH = 20, 3
RATE = partial(optax.exponential_decay, 0.5, 2, 0.5)
OF_ROWS = optax.chain(
    optax.scale_by_rss(0.1), optax.trace(0.9), optax.scale_by_schedule(RATE()), optax.scale(-1.0)
)


def pushed(step: int, number: int) -> tuple[Any, Any]:
    """The ids that a worker pushes in a step, some of them twice, and the gradients."""
    random = np.random.default_rng([step, number])
    ids = random.integers(0, COUNT, 8)
    return ids, jnp.asarray(random.normal(size=(8, LENGTH)), jnp.float32)


def rows_in_one(first: Any, steps: int, workers: int) -> Any:
    """Each row has an optimizer of its own, but for the schedule, which counts all steps."""
    alone = optax.chain(optax.scale_by_rss(0.1), optax.trace(0.9))
    rows = [*first]
    states = [alone.init(row) for row in rows]
    for step in range(steps):
        total = np.zeros((COUNT, LENGTH), np.float32)
        every = [pushed(step, number) for number in range(workers)]
        for ids, gradients in every:
            np.add.at(total, ids, np.asarray(gradients) / np.float32(workers))
        for row in {row for ids, _ in every for row in ids.tolist()}:
            update, states[row] = alone.update(jnp.asarray(total[row]), states[row])
            rows[row] = rows[row] - RATE()(step) * update
    return jnp.stack(rows)


@pytest.mark.parametrize(("servers", "workers"), [(1, 2), (2, 1)])
def test_rows_have_a_state_of_their_own(servers: int, workers: int, job: Job) -> None:
    """With two servers, one of them leaves the cluster in the middle, with what it keeps."""

    def body(number: int, made: Cluster) -> Any:
        served = ps.DistributedOptimizer(OF_ROWS, new_params())
        served.start_rows("words", COUNT, LENGTH, seed=3)
        params, first = served.pull(), ps.pull_rows("words", range(COUNT))
        for step in range(STEPS):
            if step == 3 and servers == 2:
                context.worker().scale_servers(1)
                wait_until(lambda: made.state.registry.version == 2)
            params = served.step(gradients_of(params, step, number))
            ps.push_rows("words", *pushed(step, number))
        assert served.finished_steps == STEPS
        return params, first, ps.pull_rows("words", range(COUNT))

    wanted = train_in_one(OF_ROWS, new_params(), range(STEPS), workers)
    for params, first, rows in job(OF_ROWS, body, servers=servers, workers=workers):
        assert isinstance(rows, jax.Array)
        same(params, wanted)
        same(rows, rows_in_one(first, STEPS, workers))


def test_rows_hear_of_hyperparameters(job: Job) -> None:
    """Each push says them, as some servers may have dropped the step that said them first."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    ids, ones = np.array([2]), np.ones((1, 1), np.float32)

    def body(_number: int, _: Cluster) -> list[float]:
        served = ps.DistributedOptimizer(optimizer, {"w": jnp.zeros(1)})
        served.start_rows("words", 4, 1, initializer="zeros")
        served.pull()
        found = []
        for rate in (1.0, 0.25, 0.25):
            served.step({"w": jnp.ones(1)}, {"learning_rate": rate})
            ps.push_rows("words", ids, ones)
            found.append(ps.pull_rows("words", ids).item())
        return found

    assert job(optimizer, body, workers=1) == [[-1.0, -1.25, -1.5]]


def test_rows_cannot_begin_with_a_state_of_the_weights(job: Job) -> None:
    optimizer = optax.contrib.schedule_free_sgd(0.1)

    def body(_number: int, _: Cluster) -> None:
        served = ps.DistributedOptimizer(optimizer, WEIGHTS)
        with pytest.raises(ValueError, match="'words': the state of this optimizer begins with"):
            served.start_rows("words", COUNT, LENGTH)

    job(optimizer, body, workers=1)


def test_a_server_goes_on_after_a_snapshot() -> None:
    """Whatever the optimizer keeps: moments, numbers, a flag."""
    chain = optax.chain(
        optax.scale_by_adam(), optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        optax.apply_if_finite(optax.identity(), 3),
    )  # fmt: skip
    block = Block("bfloat16", 0, (Part(0, 0, 5, 0),))
    body = describe_table([], [block], Mode(SYNC), average=True)
    undisturbed, before, after = (
        OptaxUpdater(chain, TableDescription("t", body), whole=False) for _ in range(3)
    )
    random = np.random.default_rng(0)
    gradients = [[random.normal(size=5).astype(jnp.bfloat16)] for _ in range(6)]
    for updater in (undisturbed, before):
        updater.begin([np.ones(5, jnp.bfloat16)])
        for each in gradients[:3]:
            updater.step(each, [{"learning_rate": 0.5}])
    after.begin(before.values())
    kept = {name: array.copy() for name, array in before.state().items()}
    assert not any(array.dtype == bool for array in kept.values())
    after.load(kept)
    for updater in (undisturbed, after):
        for each in gradients[3:]:
            updater.step(each, [{"learning_rate": 0.25}])
    np.testing.assert_array_equal(after.values(), undisturbed.values())
    assert after.values()[0].dtype == jnp.bfloat16 and np.isfinite(after.values()).all()


def test_real_processes_train_save_and_load(site: Site) -> None:
    with cluster(site, 2, 2, main, JAX_PLATFORMS="cpu") as job:
        assert not job.wait_for_all()
    files = [np.load(site.folder / f"worker{number}.npz") for number in range(2)]
    wanted = train_in_one(optax.adam(0.05), new_params(), range(STEPS))
    for name, each in zip(files[0].files, jax.tree_util.tree_leaves(wanted), strict=True):
        np.testing.assert_array_equal(files[0][name], files[1][name])
        found = np.asarray(each, np.float32)
        np.testing.assert_allclose(files[0][name], found, rtol=1e-5, atol=1e-5)
