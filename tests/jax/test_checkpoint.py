"""Checkpoints of what JAX makes states of: nodes of pytrees, of flax and others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hvdlite.jax as hvd
from tests.jax.cases import same
from tests.ranks import run_ranks

CHAIN = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))


class Statistics(NamedTuple):
    mean: Any
    nothing: Any


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    weight: Any
    scales: Any


@jax.tree_util.register_pytree_node_class
class Ring:
    """A node whose parts have no names."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux: None, children: Any) -> Ring:
        return cls(*children)


def nodes(value: float) -> dict[str, Any]:
    return {
        "layer": Layer(jnp.full((2, 3), value), {"a": jnp.full(2, value)}),
        "ring": Ring(jnp.full(2, value), {"deep": [jnp.full(1, value)]}),
        "statistics": Statistics(jnp.full(3, value), None),
        "empty": (optax.EmptyState(), optax.MaskedNode()),
        "pair": (jnp.full(2, value), {"b": jnp.full(2, value)}),
    }


def of_flax(value: float) -> dict[str, Any]:
    """States of flax, with optimizers of optax in them."""
    freeze = pytest.importorskip("flax.core").freeze
    training = pytest.importorskip("flax.training.train_state")
    variables = freeze({"params": {"dense": {"kernel": jnp.full((2, 3), value)}}, "count": value})
    params = freeze({"dense": {"kernel": jnp.full((2, 3), value), "bias": jnp.full(3, value)}})
    train = training.TrainState.create(apply_fn=len, params=params, tx=CHAIN)
    filled = jax.tree_util.tree_map(lambda leaf: jnp.full_like(leaf, value), train)
    return {"variables": variables, "train": filled.replace(step=int(value))}


@pytest.mark.parametrize("make", [nodes, of_flax])
@pytest.mark.parametrize("ranks", [(2, 3), (3, 1)])
def test_nodes_come_back_on_another_number_of_ranks(
    tmp_path: Path, make: Any, ranks: tuple[int, int]
) -> None:
    def load(rank: int) -> Any:
        begun = make(0.0)
        before = jax.tree_util.tree_map(jnp.array, begun)
        held = {name: node for name, node in begun.items() if not isinstance(node, tuple)}
        found = hvd.checkpoint.load(tmp_path / "state", begun)
        same({name: held[name] for name in held}, {name: before[name] for name in held}, 0)
        return found

    saved, loaded = ranks
    run_ranks(saved, lambda rank: hvd.checkpoint.save(tmp_path / "state", make(5.0)))
    for found in run_ranks(loaded, load):
        same(found, make(5.0), 0)


def test_a_frozen_dict_alone_is_a_state(tmp_path: Path) -> None:
    freeze = pytest.importorskip("flax.core").freeze
    hvd.checkpoint.save(tmp_path / "state", freeze({"a": {"b": jnp.arange(3.0)}}))
    begun = freeze({"a": {"b": jnp.zeros(3)}})
    found = hvd.checkpoint.load(tmp_path / "state", begun)
    same(found, freeze({"a": {"b": np.arange(3.0)}}), 0)
    same(begun, freeze({"a": {"b": np.zeros(3)}}), 0)


def test_what_torch_has_saved_is_loaded(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("hvdlite.torch").checkpoint
    freeze = pytest.importorskip("flax.core").freeze
    weights = torch.arange(12.0).reshape(4, 3)

    def save(rank: int) -> None:
        rows = weights[rank * 2 : rank * 2 + 2].clone()
        state = {"params": {"dense": {"kernel": rows, "bias": torch.arange(3.0)}}}
        layouts = {"params.dense.kernel": theirs.Layout([2], [0, -1])}
        theirs.save(tmp_path / "state", state, layouts)

    run_ranks(2, save)
    begun = {"params": freeze({"dense": {"kernel": jnp.zeros((4, 3)), "bias": jnp.zeros(3)}})}
    found = run_ranks(3, lambda rank: hvd.checkpoint.load(tmp_path / "state", {**begun}))
    for each in found:
        same(each["params"]["dense"]["kernel"], weights.numpy(), 0)
        same(each["params"]["dense"]["bias"], np.arange(3.0), 0)
        assert type(each["params"]) is type(begun["params"])


def test_parts_in_a_node_are_gathered(tmp_path: Path) -> None:
    """A state that is divided, in the state of flax."""
    training = pytest.importorskip("flax.training.train_state")
    params = {"w": jnp.arange(5.0)}

    def state_of(optimizer: Any) -> Any:
        train = training.TrainState.create(apply_fn=len, params=params, tx=optimizer)
        return train.apply_gradients(grads={"w": jnp.arange(5.0) + 1})

    def save(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(optax.adam(1e-2), shard_state=True)
        hvd.checkpoint.save(tmp_path / "state", {"train": state_of(optimizer)})

    run_ranks(2, save)
    begun = {"train": state_of(optax.adam(1e-2)).replace(params={"w": jnp.zeros(5)})}
    moments = begun["train"].opt_state[0]
    empty = moments._replace(mu={"w": jnp.zeros(5)}, nu={"w": jnp.zeros(5)})
    begun["train"] = begun["train"].replace(opt_state=(empty, *begun["train"].opt_state[1:]))
    found = hvd.checkpoint.load(tmp_path / "state", begun)
    same(found["train"].opt_state, state_of(optax.adam(1e-2)).opt_state, 1e-6)
    same(found["train"].params, state_of(optax.adam(1e-2)).params, 1e-6)
