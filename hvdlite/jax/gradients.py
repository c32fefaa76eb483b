"""Gradients that are reduced over all ranks: of a pytree, in one exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hvdlite.common.gradients import reducer
from hvdlite.common.gradients.buckets import batches_of
from hvdlite.common.gradients.variables import Sources
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.segmentation import strategies as segmentation
from hvdlite.common.tensors.compression import COMPLEX
from hvdlite.jax.calls import Call
from hvdlite.jax.programs import exchange, is_of_integers, is_tracing

Gradients = Mapping[str, Any]


class _Leaf(str):
    """The path of a leaf as the user writes it, and the keys that lead to the leaf."""

    keys: tuple[str, ...]

    @classmethod
    def at(cls, path: tuple[Any, ...]) -> _Leaf:
        leaf = cls(jax.tree_util.keystr(path))
        leaf.keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        return leaf


class _Paths(Sources):
    """Leaves of pytrees, which are known by their paths."""

    def __init__(self) -> None:
        super().__init__(str)

    def key_of(self, source: Any) -> Any:
        """Return the path: equal ones are of the same leaf."""
        return source

    def path_of(self, source: Any) -> str:
        """Return the path as it is."""
        path: str = source
        return path

    name_of = path_of


class Reducer(reducer.Reducer):
    """Reduces the gradients of a pytree, at once or in the program that is being traced."""

    sources: ClassVar[Sources] = _Paths()
    variable = "path of a leaf, such as \"['dense']['kernel']\""

    def reduce_tree(self, gradients: Any) -> Any:
        """Return the gradients, reduced over all ranks, in the structure that they have.

        Raises `HorovodInternalError` when the reduction fails, and outside of a program at once.
        """
        leaves, structure = jax.tree_util.tree_flatten_with_path(gradients)
        sent = [(path, leaf) for path, leaf in leaves if not is_of_integers(leaf)]
        paths = [_Leaf.at(path) for path, _ in sent]
        reduced = iter(self.reduce([leaf for _, leaf in sent], paths))
        results = [leaf if is_of_integers(leaf) else next(reduced) for _, leaf in leaves]
        return jax.tree_util.tree_unflatten(structure, results)

    def send(
        self, gradients: Gradients, sources: Mapping[str, Any], groups: Sequence[Sequence[str]]
    ) -> Gradients:
        """Reduce the gradients, of which each starts as soon as it is computed."""
        if not gradients:
            return {}
        return _send(
            self, {name: jnp.asarray(each) for name, each in gradients.items()}, groups, ""
        )

    def describe(self, name: str, gradient: Any, source: Any) -> segmentation.Gradient | None:
        array = jnp.asarray(gradient)
        path = source
        if isinstance(source, _Leaf):  # As in models: a key such as "mlp/~/linear_0" is one step.
            path = ".".join(key.replace(".", "_").replace("/", "_") for key in source.keys)
        return segmentation.Gradient(name, array.nbytes, array.dtype.name, path)


def _send(
    reducer: Reducer, gradients: Gradients, groups: Sequence[Sequence[str]], suffix: str
) -> Gradients:
    """Reduce gradients; the collectives have their names, with `suffix` behind them."""
    compression = reducer.reduction.compression
    if reducer.feedback is None:
        packed = {name: compression.compress(each) for name, each in gradients.items()}
    else:
        if any(jnp.iscomplexobj(each) for each in gradients.values()):
            raise ValueError(COMPLEX)
        packed = {name: (each, None) for name, each in gradients.items()}
    parts = []
    arrays = {name: array for name, (array, _) in packed.items()}
    for names, options in reducer.planned(arrays, groups, partial(_batches, arrays)):
        keys = tuple(f"{name}{suffix}" for name in names)
        call = Call("allreduce", options(keys), names=keys, exchange=reducer.feedback)
        parts.append((names, call))

    def back(upstream: list[Any]) -> list[Any]:
        order = [name for names, _ in parts for name in names]
        reduced = _send(
            reducer, dict(zip(order, upstream, strict=True)), groups, f"{suffix}.gradient"
        )
        return [reduced[name] for name in order]

    results = exchange([(call, [arrays[name] for name in names]) for names, call in parts], back)
    reduced = {
        name: result
        for (names, _), each in zip(parts, results, strict=True)
        for name, result in zip(names, each, strict=True)
    }
    if reducer.feedback is not None:
        return reduced
    return {name: compression.decompress(reduced[name], packed[name][1]) for name in gradients}


def _batches(arrays: Gradients, names: list[str]) -> list[list[str]]:
    """Divide gradients that are reduced on their own into those that are handed over together."""
    if not is_tracing():
        return [names] if names else []
    sizes = {name: int(np.prod(arrays[name].shape)) * arrays[name].dtype.itemsize for name in names}
    # Backward computes the gradients of the last layer first.
    return batches_of(names[::-1], sizes, for_collective().topology, 0)
