"""How a framework describes its tensors, models and optimizers to checkpoints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlite.checkpoint import compression
from hvdlite.checkpoint.manifest import Manifest
from hvdlite.common.gradients.variables import inside_scalers
from hvdlite.common.layouts.layout import Box, Layout
from hvdlite.common.tensors.adapter import DTYPES
from hvdlite.common.tensors.comparison import without_numbers

Array = NDArray[Any]


class Part(NamedTuple):
    """The part of a tensor of `shape` that a sharded tensor holds on this rank."""

    shape: tuple[int, ...]
    box: Box


@dataclass
class Owner:
    """An object with tensors in it, such as a model: a dict of them, and how it takes one back.

    Instead of a dict it may have one tensor, under its own name.
    """

    thing: Any
    tree: Any
    install: Callable[[Any], object]
    is_replaced: bool = False  # by what `install` returns, as it cannot be changed
    # The names of tensors in the tree, with the names in the state of those they are cut like.
    follows: Mapping[str, str] = field(default_factory=dict)
    # The layouts of tensors in the tree that are never whole, by their names there.
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    # Whether a load gives it all that the checkpoint has of it, and not what it holds alone.
    takes_all: bool = False
    # The tree with its own owners in it, and lists where it has tuples; set by `trees.expand`.
    expanded: Any = None


class Context(NamedTuple):
    """What an owner may look at while its tree is made: the whole state, and what there is to load.

    `manifest` is None in a save. `prefix` is the name of the owner, with a dot, or "".
    """

    state: Any
    prefix: str
    manifest: Manifest | None


class Tensors:
    """Arrays of numpy. Subclasses add the tensors and objects of a framework."""

    # By the ids of objects whose state is divided among ranks, what `gather_of` has returned.
    whole: Mapping[int, Any] = MappingProxyType({})

    def is_tensor(self, value: Any) -> bool:
        """Return whether `value` has an array."""
        return isinstance(value, (np.ndarray, np.generic))

    def kind(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        """Return the name of the dtype and the shape of what this rank holds."""
        return tensor.dtype.name, tuple(tensor.shape)

    def has_values(self, tensor: Any) -> bool:
        """Return whether there is more of a tensor than its dtype and shape."""
        return True

    def array(self, tensor: Any) -> Array:
        """Return the values on the host, which may share the tensor's memory."""
        return np.asarray(tensor)

    def store(self, tensor: Any, values: Array) -> Any:
        """Give a tensor these values of its dtype; return it, or what stands for it from now on."""
        if isinstance(tensor, np.ndarray) and tensor.flags.writeable:
            np.copyto(tensor, values)
            return tensor
        return values.copy() if isinstance(tensor, np.ndarray) else values[()]

    def part(self, tensor: Any) -> Part | None:
        """Return the part that a tensor holds which knows it; None for one that does not."""
        return None

    def owner(self, thing: Any, context: Context) -> Owner | None:
        """Return the tensors of an object that has some; None for any other."""
        return None

    def parts(self, thing: Any) -> Mapping[Any, Any]:
        """Return what is in a thing that is no dict and no list, where there may be divided ones.

        The names are the same on all ranks.
        """
        return {}

    def gather_of(self, thing: Any, name: str) -> Callable[[], Any] | None:
        """Return what gathers the whole state of an object that is divided; None for any other.

        All ranks call what is returned. Raises `ValueError` for a part of a state that cannot be
        gathered, which is `name` in the state.
        """
        return None


def kinds_of(leaves: Mapping[str, Any], tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and local shapes of those leaves of a state that are tensors, by their names.

    Raises `ValueError` that names a tensor of a dtype which could be written and never read again,
    or one without values.
    """
    kinds = {}
    for name, leaf in leaves.items():
        if not tensors.is_tensor(leaf):
            continue
        try:
            kinds[name] = tensors.kind(leaf)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        if not tensors.has_values(leaf):
            raise ValueError(
                f"{name!r} is on the meta device, where tensors have no values: create it on "
                "another one, or give its module memory by to_empty() and values before this"
            )
        if kinds[name][0] not in DTYPES:
            raise ValueError(
                f"{name!r} is {kinds[name][0]}, which checkpoints do not have: convert it to one "
                f"of {', '.join(sorted(DTYPES))}"
            )
    return kinds


# Variables that have `numpy()` and `assign()`: those of Keras, and of TensorFlow.


# The name of a variable that was given none, as Nadam's product: Keras counts these as well.
COUNTED = re.compile(r"variable(_\d+)?")


class VariableTensors(Tensors):
    """Variables, and the models and optimizers of Keras that have some."""

    def is_tensor(self, value: Any) -> bool:
        return _is_variable(value) or super().is_tensor(value)

    def kind(self, tensor: Any) -> tuple[str, tuple[int, ...]]:
        if super().is_tensor(tensor):
            return super().kind(tensor)
        dtype = getattr(tensor.dtype, "name", tensor.dtype)  # Keras has names, TensorFlow objects.
        return str(dtype), tuple(tensor.shape)

    def array(self, tensor: Any) -> Array:
        return np.asarray(tensor.numpy() if _is_variable(tensor) else tensor)

    def store(self, tensor: Any, values: Array) -> Any:
        """Assign values to a variable, and return it."""
        if not _is_variable(tensor):
            return super().store(tensor, values)
        tensor.assign(values)
        return tensor

    def owner(self, thing: Any, context: Context) -> Owner | None:
        """Return the variables of a model, a layer or an optimizer by their paths within it.

        Raises `ValueError` for one that has not been built: its variables do not exist yet.
        """
        if isinstance(thing, (type, Mapping, list, tuple)) or not hasattr(thing, "variables"):
            return None  # Dicts and lists of models are what is in them.
        if not getattr(thing, "built", True):
            raise ValueError(
                f"the {type(thing).__name__} {getattr(thing, 'name', '')!r} has no variables yet: "
                "call build() before the checkpoint (of an optimizer, with the trainable "
                "variables of its model)"
            )
        # An optimizer whose state is divided is given as one that has all of it.
        holder = self.whole.get(id(thing), thing)
        # The weights of a model are its variables but for seeds, of which ranks keep their own.
        variables = getattr(holder, "weights", holder.variables)
        models = [] if hasattr(thing, "weights") else _names_of_models(context.state)
        attributes = {id(value): name for name, value in getattr(holder, "__dict__", {}).items()}
        tree: dict[str, Any] = {}
        for variable in variables() if callable(variables) else variables:
            # Keras counts models and optimizers of a process, so the next one has another name.
            path = str(getattr(variable, "path", None) or variable.name)
            name = path.removeprefix(f"{getattr(holder, 'name', '')}/")
            if COUNTED.fullmatch(name):
                name = attributes.get(id(variable), name)
            for model in models:
                name = name.removeprefix(f"{model}_")  # in the state of an optimizer
            if name in tree:
                raise ValueError(f"two variables have the name {name!r}: rename a layer")
            tree[name] = variable
        if context.manifest is not None:
            tree = _as_saved(tree, context.prefix, context.manifest.names)

        compressing = inside_scalers(thing)
        remembered = {} if compressing is None else compressing.compression_state()
        entries, layouts = compression.described(remembered, context.manifest, context.prefix)

        def install(loaded: dict[Any, Any]) -> None:
            if holder is not thing:
                thing.adopt(holder)
            if entries:
                compressing.load_compression_state(compression.restored(loaded[compression.KEY]))

        return Owner(thing, tree | entries, install, layouts=layouts)

    def gather_of(self, thing: Any, name: str) -> Callable[[], Any] | None:
        """Return what gathers the state of a Keras optimizer with ``shard_state=True``."""
        inner = inside_scalers(thing)
        settings = getattr(type(inner), "_hvdlite_settings", None)
        if settings is None or not settings.shard_state or not getattr(inner, "built", True):
            return None
        if inner is not thing:
            raise ValueError(
                f"{name}: a loss scaler is around an optimizer with shard_state=True, whose state "
                "it has in part: give its inner_optimizer"
            )
        return thing.consolidate if settings.reduction.active else None


def _as_saved(tree: dict[str, Any], prefix: str, saved: Iterable[str]) -> dict[str, Any]:
    """Return variables by the names that they have in a checkpoint.

    Keras counts layers over all models of a process: of a model that is built once more, they have
    other numbers, and the same order.
    """
    names = [name.removeprefix(prefix) for name in saved if name.startswith(prefix)]
    if tree.keys() <= set(names):
        return tree
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(without_numbers(name), []).append(name)
    counts = Counter(map(without_numbers, tree))
    if any(len(alike.get(kind, ())) != count for kind, count in counts.items()):
        return tree
    return {alike[without_numbers(name)].pop(0): each for name, each in tree.items()}


def _names_of_models(state: Any) -> list[str]:
    things = state.values() if isinstance(state, dict) else ()
    names = [
        str(each.name) for each in things if hasattr(each, "weights") and hasattr(each, "name")
    ]
    return sorted(names, key=len, reverse=True)


def _is_variable(value: Any) -> bool:
    return hasattr(value, "assign") and hasattr(value, "numpy") and hasattr(value, "shape")
