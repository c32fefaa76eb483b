"""What a server makes of a transformation of optax: it steps over the server's flat blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hvdlite.jax.trees import from_host, to_host
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowStore
from hvdlite.ps.tables.row_table import AddedRows

_LEAST = 128  # Compiled code rounds alike in all vectors of a processor that are full.


def named(state: Any) -> dict[str, Any]:
    """Return the leaves of a state by their paths, such as ``[0].mu``."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def first_state(optimizer: optax.GradientTransformation, values: Any) -> Any:
    """Return the state of an optimizer before its first step, all of it arrays."""
    return jax.tree_util.tree_map(jnp.asarray, optimizer.init(values))


def with_numbers(state: Any, numbers: Mapping[str, Any]) -> Any:
    """Return a state of `optax.inject_hyperparams` with other numbers.

    Raises `KeyError` for a name that it does not have, or a schedule for.
    """
    for name, number in numbers.items():
        found = [value for _, value in optax.tree_utils.tree_get_all_with_path(state, name)]
        # Beside the number of a schedule there is the schedule, which overwrites it.
        if not found or not all(getattr(value, "shape", None) == () for value in found):
            raise KeyError(name)
        state = optax.tree_utils.tree_set(state, **{name: jnp.asarray(number, found[0].dtype)})
    return state


class OptaxUpdater:
    """Steps with the user's own transformation: each block has a state of its own.

    Nothing of it is sent or unpickled: the server runs the same script as the workers.
    """

    def __init__(
        self, optimizer: optax.GradientTransformation, described: TableDescription, *, whole: bool
    ) -> None:
        """Let `whole` tensors keep their shapes and have states of their own."""
        self._optimizer = optimizer
        self._shapes = described.shapes(whole=whole)
        self._values: list[Any] = []  # Of each block, or of each tensor.
        self._states: list[Any] = []
        self._numbers: Mapping[str, Any] = {}
        self._step = jax.jit(self._all_steps)

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        self._values = self._cut(values)
        self._states = [first_state(self._optimizer, each) for each in self._values]
        self._numbers = {}

    def _cut(self, blocks: Sequence[Array]) -> list[Any]:
        """Return what blocks consist of, in memory of its own: a state may keep gradients."""
        found = []
        for block, shapes in zip(blocks, self._shapes, strict=True):
            ends = np.cumsum([prod(shape) for shape in shapes[:-1]], dtype=np.int64)
            for piece, shape in zip(np.split(block, ends), shapes, strict=True):
                found.append(jnp.asarray(np.array(piece.reshape(shape))))
        return found

    def values(self) -> list[Array]:
        """See `Updater`."""
        flat = iter([np.asarray(each).reshape(-1) for each in self._values])
        blocks = [[next(flat) for _ in shapes] for shapes in self._shapes]
        return [pieces[0] if len(pieces) == 1 else np.concatenate(pieces) for pieces in blocks]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        for given in numbers[:1]:
            if given != self._numbers:
                self._numbers = given
                self._states = [with_numbers(state, given) for state in self._states]
        stepped = self._step(self._values, self._states, self._cut(gradients))
        self._values, self._states = jax.block_until_ready(stepped)

    def _all_steps(
        self, values: Sequence[Any], states: Sequence[Any], gradients: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        made = [
            self._optimizer.update(*each) for each in zip(gradients, states, values, strict=True)
        ]
        stepped = [*map(optax.apply_updates, values, [updates for updates, _ in made])]
        return stepped, [state for _, state in made]

    def state(self) -> dict[str, Array]:
        """See `Updater`: names are ``NUMBER.PATH``, with the numbers of blocks or tensors."""
        return {
            f"{number}.{path}": _kept(leaf)
            for number, state in enumerate(self._states)
            for path, leaf in named(state).items()
        }

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""

        def found(number: int, path: Any, leaf: Any) -> Any:
            array = state.get(f"{number}.{jax.tree_util.keystr(path)}")
            if array is None:
                return leaf
            like = to_host(leaf)
            return from_host(array.reshape(like.shape).astype(like.dtype), leaf)

        for number, own in enumerate(self._states):
            self._states[number] = jax.tree_util.tree_map_with_path(partial(found, number), own)


def _kept(leaf: Any) -> Array:
    """Return a leaf of a state in a dtype that a server can keep."""
    array = to_host(leaf)
    return array.astype(np.uint8) if array.dtype == np.bool_ else array


# Rows of an embedding. Those that nobody has pushed do not change, nor does what belongs to them in
# the state: their momentum waits. What is one for all rows, such as the count of steps, moves on
# with each step of the table.


class OptaxRows(AddedRows):
    """Steps over the rows that were pushed."""

    def __init__(self, store: RowStore, optimizer: optax.GradientTransformation) -> None:
        super().__init__(store)
        self._optimizer = optimizer
        first = first_state(optimizer, jnp.zeros(1, store.values.dtype))
        self._structure = jax.tree_util.tree_structure(first)
        leaves = {path: to_host(leaf) for path, leaf in named(first).items()}
        self._paths = list(leaves)
        self._first = {path: leaf for path, leaf in leaves.items() if leaf.shape == (1,)}
        self._common = {path: leaf for path, leaf in leaves.items() if path not in self._first}
        self._numbers: Mapping[str, Any] = {}
        self._step = jax.jit(self._one_step)
        self._add_slots()

    def _add_slots(self) -> None:
        for path, leaf in self._first.items():
            self.store.add_slot(path, leaf.item(), leaf.dtype)

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        super().begin(values)
        self._add_slots()
        self._numbers = {}

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        for given in numbers[:1]:
            if given != self._numbers:
                leaves = {**self._first, **self._common}
                ordered = [leaves[path] for path in self._paths]
                own = jax.tree_util.tree_unflatten(self._structure, ordered)
                changed = named(with_numbers(own, given))
                self._common = {path: to_host(changed[path]) for path in self._common}
                self._numbers = given
        ids, rows = gradients
        places, slots = self.store.places(ids), self.store.slots
        state = {path: _flat(slot[places]) for path, slot in slots.items()}
        values, state = self._step(
            _flat(self.store.values[places]), {**state, **self._common}, _flat(rows)
        )
        self.store.values[places] = _rows(values, rows.shape)
        for path, slot in self.store.slots.items():
            slot[places] = _rows(state[path], rows.shape)
        self._common = {path: np.array(state[path]) for path in self._common}

    def _one_step(self, values: Any, state: Mapping[str, Any], gradients: Any) -> Any:
        leaves = [state[path] for path in self._paths]
        own = jax.tree_util.tree_unflatten(self._structure, leaves)
        updates, own = self._optimizer.update(gradients, own, values)
        return optax.apply_updates(values, updates), named(own)

    def state(self) -> dict[str, Array]:
        """See `Updater`: what belongs to the rows, and what is one for all of them."""
        common = {path: _kept(leaf) for path, leaf in self._common.items()}
        return {**self.store.slots, **common}

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""
        for path, array in state.items():
            if path in self._first:
                self.store.slots[path][:] = array.reshape(len(self.store), self.store.spec.length)
            elif path in self._common:
                self._common[path] = array.astype(self._common[path].dtype)


def _flat(array: Array) -> Array:
    """Return rows as a flat array, with zeros behind them up to a power of two.

    So few programs are compiled, and a row's step does not depend on those beside it.
    """
    padded = np.zeros(max(_LEAST, 1 << (array.size - 1).bit_length()), array.dtype)
    padded[: array.size] = array.reshape(-1)
    return padded


def _rows(array: Any, shape: tuple[int, ...]) -> Array:
    return np.asarray(array)[: prod(shape)].reshape(shape)
