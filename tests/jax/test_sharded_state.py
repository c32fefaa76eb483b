"""Optimizers with ``shard_state=True``, against a process that has the data of all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hvdlite.jax as hvd
from tests.jax.cases import RANKS, Case, Outcomes, same, values
from tests.jax.test_training import ADAM, PARAMS, SGD, loss, made, of, train, train_one
from tests.ranks import run_ranks

ALL = slice(None)
Sharded = partial(hvd.DistributedOptimizer, shard_state=True)
MOMENTUM = partial(optax.sgd, 1e-1, momentum=0.9)


def labelled() -> Any:
    """Other transformations for other parameters, by their paths."""
    labels = {"first": "adam", "last": "momentum"}
    return optax.multi_transform({"adam": ADAM(), "momentum": MOMENTUM()}, labels)


OPTIMIZERS: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "adam": (lambda: Sharded(ADAM()), ADAM),
    "sgd": (lambda: Sharded(SGD()), SGD),
    "sum": (lambda: Sharded(optax.sgd(1e-1 / RANKS), op=hvd.Sum), SGD),
    "predivided": (lambda: Sharded(MOMENTUM(), gradient_predivide_factor=2.0), MOMENTUM),
    "labelled": (lambda: Sharded(labelled()), labelled),
    "fp16": (lambda: Sharded(SGD(), compression=hvd.Compression.fp16), SGD),
    "passes": (
        lambda: Sharded(MOMENTUM(), backward_passes_per_step=2),
        lambda: optax.MultiSteps(MOMENTUM(), 2, use_grad_mean=False),
    ),
    "mean of passes": (
        lambda: Sharded(ADAM(), backward_passes_per_step=2, average_aggregated_gradients=True),
        lambda: optax.MultiSteps(ADAM(), 2),
    ),
    "clipped by value": (
        lambda: Sharded(optax.chain(optax.clip(1e-2), ADAM())),
        lambda: optax.chain(optax.clip(1e-2), ADAM()),
    ),
}  # fmt: skip
COMPILED = {name: make for name, (make, _) in OPTIMIZERS.items()}
NOW = {name: COMPILED[name] for name in ("adam", "passes")}


def stepped(optimizer: Any, rows: Any, params: Any = PARAMS, state: Any = None) -> Any:
    """Parameters and state after a step that is not compiled."""
    from tests.jax.test_training import INPUTS, TARGETS

    found = jax.grad(loss)(params, INPUTS[rows], TARGETS[rows])
    state = optimizer.init(params) if state is None else state
    updates, state = optimizer.update(found, state, params)
    return optax.apply_updates(params, updates), state


def elements(tree: Any) -> int:
    return sum(np.size(leaf) for leaf in jax.tree_util.tree_leaves(tree))


def on_a_process_set(rank: int) -> Any:
    members = hvd.add_process_set([1, 2])
    return train_one(Sharded(ADAM(), process_set=members), of(rank)) if rank else PARAMS


def consolidated(rank: int) -> Any:
    """The whole state, and what goes on from it."""
    optimizer = Sharded(ADAM())
    params, state = stepped(optimizer, of(rank))
    whole = optimizer.consolidate(state)
    adopted = optimizer.adopt(whole, params)
    same(adopted, state, 0)
    compiled = jax.jit(optimizer.init)(params)
    same(jax.tree_util.tree_map(jnp.zeros_like, state), compiled, 0)
    again, _ = stepped(optimizer, of(rank), params, adopted)
    return whole, again, elements(state)


def cases(folder: Path) -> dict[str, Case]:
    return {
        "sharded": lambda rank: train(made(COMPILED), of(rank)),
        "sharded now": lambda rank: train(made(NOW), of(rank), jax.value_and_grad, False),
        "sharded set": on_a_process_set,
        "consolidated": consolidated,
        "whole state": lambda rank: stepped(Sharded(ADAM()), of(rank), PARAMS, ADAM().init(PARAMS)),
    }


@pytest.fixture(scope="module")
def alone() -> Any:
    return train({name: make() for name, (_, make) in OPTIMIZERS.items()}, ALL)


@pytest.mark.parametrize(
    ("how", "name"),
    [("sharded", name) for name in COMPILED] + [("sharded now", name) for name in NOW],
)
def test_an_optimizer(outcomes: Outcomes, alone: Any, how: str, name: str) -> None:
    for found in values(outcomes, how):
        same(found[name], alone[name], 1e-3 if name == "fp16" else 2e-5)


def test_a_process_set_trains_alone(outcomes: Outcomes) -> None:
    found = values(outcomes, "sharded set")
    wanted = train_one(ADAM(), np.r_[of(1), of(2)])
    same([found[1], found[2]], [wanted, wanted], 2e-5)
    same(found[0], PARAMS, 0)


def test_a_state_is_divided_and_put_together(outcomes: Outcomes) -> None:
    params, state = stepped(ADAM(), ALL)
    two, _ = stepped(ADAM(), ALL, params, state)
    lengths = [-(-np.size(leaf) // RANKS) for leaf in jax.tree_util.tree_leaves(PARAMS)]
    for whole, again, count in values(outcomes, "consolidated"):
        same(whole, state, 2e-5)
        same(again, two, 2e-5)
        assert count == 2 * sum(lengths) + 1, "its parts of two arrays each, and the count of steps"


def test_a_state_that_is_whole_is_refused(outcomes: Outcomes) -> None:
    for outcome in outcomes:
        assert "the state is whole" in outcome["whole state"].text


def test_a_checkpoint_fits_other_numbers_of_ranks(tmp_path: Path) -> None:
    """Saved by two ranks, gone on with by three, and by one whose state is whole."""

    def save(rank: int) -> Any:
        optimizer = Sharded(ADAM())
        params, state = stepped(optimizer, ALL)
        hvd.checkpoint.save(tmp_path / "state", {"params": params, "opt": state})

    def load(rank: int) -> Any:
        optimizer = Sharded(ADAM()) if rank >= 0 else ADAM()
        params = jax.tree_util.tree_map(jnp.array, PARAMS)
        begun = {"params": params, "opt": optimizer.init(params)}
        found = hvd.checkpoint.load(tmp_path / "state", begun)
        assert jax.tree_util.tree_structure(found) == jax.tree_util.tree_structure(begun)
        return stepped(optimizer, ALL, found["params"], found["opt"])[0]

    run_ranks(2, save)
    wanted, state = stepped(ADAM(), ALL)
    wanted, _ = stepped(ADAM(), ALL, wanted, state)
    for found in [*run_ranks(3, load), load(-1)]:
        same(found, wanted, 2e-5)


def test_an_elastic_state_is_divided_anew() -> None:
    """Two ranks commit a step; one of them, with two newcomers, goes on from it."""

    def begin(rank: int) -> Any:
        optimizer = Sharded(ADAM())
        state = hvd.elastic.JaxState(params=PARAMS, opt=optimizer.init(PARAMS))
        state.sync()
        state.params, state.opt = stepped(optimizer, ALL, state.params, state.opt)
        state.save()
        state.opt = jax.tree_util.tree_map(jnp.zeros_like, state.opt)
        state.restore()
        return state

    survivor, _ = run_ranks(2, begin)

    def go_on(rank: int) -> Any:
        optimizer = Sharded(ADAM())
        if rank == 0:
            state = survivor
            state._saved.enter_world()  # As in a reset, but for programs of other threads.
        else:
            state = hvd.elastic.JaxState(params=PARAMS, opt=optimizer.init(PARAMS))
        state.sync()
        return stepped(optimizer, ALL, state.params, state.opt)[0]

    wanted, state = stepped(ADAM(), ALL)
    wanted, _ = stepped(ADAM(), ALL, wanted, state)
    for found in run_ranks(3, go_on):
        same(found, wanted, 2e-5)


def test_a_first_sync_gives_what_was_saved_last() -> None:
    """As for a state that is not divided: what came after the save is not shared."""

    def main(rank: int) -> Any:
        optimizer = Sharded(ADAM())
        params, opt = stepped(optimizer, ALL)
        state = hvd.elastic.JaxState(params=params, opt=opt, step=1)
        state.params, state.opt = stepped(optimizer, ALL, params, opt)
        state.step = 2
        state.sync()
        assert state.step == 1
        return stepped(optimizer, ALL, state.params, state.opt)[0]

    wanted, state = stepped(ADAM(), ALL)
    wanted, _ = stepped(ADAM(), ALL, wanted, state)
    for found in run_ranks(2, main):
        same(found, wanted, 2e-5)


def test_a_state_of_other_ranks_is_refused() -> None:
    optimizer = Sharded(ADAM())
    (_, state), _ = run_ranks(2, lambda rank: stepped(optimizer, ALL))

    def use(rank: int) -> None:
        for call in (
            lambda: stepped(optimizer, ALL, PARAMS, state),
            lambda: optimizer.consolidate(state),
        ):
            with pytest.raises(RuntimeError, match=r"divided among 2 ranks.*have changed"):
                call()

    run_ranks(3, use)


def test_parts_stay_where_they_are() -> None:
    optimizer = Sharded(ADAM())

    def share(rank: int) -> Any:
        _, state = stepped(optimizer, ALL)
        same(hvd.broadcast_parameters(state), state, 0)

    run_ranks(2, share)


def _mask(params: Any) -> Any:
    return jax.tree_util.tree_map(lambda leaf: leaf.ndim > 1, params)


LOOKING_BEYOND = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), SGD()),
    "block norm": lambda: optax.chain(optax.clip_by_block_rms(0.1), SGD()),
    "lamb": lambda: optax.lamb(1e-2),
    "lars": lambda: optax.lars(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "mask by ndim": lambda: optax.adamw(1e-2, mask=_mask, weight_decay=0.1),
    "finite": lambda: optax.apply_if_finite(SGD(), 3),
    "noise": lambda: optax.noisy_sgd(1e-2, key=0),
}


@pytest.mark.parametrize("name", LOOKING_BEYOND)
def test_an_optimizer_that_looks_beyond_an_element_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="treats each element on its own"):
        Sharded(LOOKING_BEYOND[name]())


def test_what_depends_on_the_parameters_is_refused_with_them() -> None:
    factored = optax.scale_by_factored_rms(min_dim_size_to_factor=8)

    def init(rank: int) -> None:
        with pytest.raises(ValueError, match="do not follow the parameters"):
            Sharded(factored).init({"w": jnp.zeros((16, 16))})
        inner = {"by norm": optax.lamb(1e-2), "else": SGD()}
        lamb = optax.multi_transform(inner, {"w": "by norm", "b": "else"})
        with pytest.raises(ValueError, match="other values"):
            Sharded(lamb).init({"w": jnp.zeros((16, 16)), "b": jnp.zeros(3)})

    run_ranks(2, init)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"op": hvd.Max}, "op must be Average or Sum, not Max"),
        ({"op": hvd.Adasum}, "op must be Average or Sum, not Adasum"),
        ({"groups": 2}, "groups have no place"),
        ({"segmentation": "size:80,20"}, "a segmentation has no place"),
        ({"compression": hvd.Compression.topk(0.1)}, "compresses gradient by gradient"),
    ],
)
def test_what_cannot_be_combined_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Sharded(SGD(), **options)
