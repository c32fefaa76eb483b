"""How a framework describes its tensors, models and optimizers to checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdlite.checkpoint.manifest import Manifest
from hvdlite.common.layouts.layout import Box
from hvdlite.common.plain.adapter import DTYPES

Array = NDArray[Any]


class Part(NamedTuple):
    """The part of a tensor of `shape` that a sharded tensor holds on this rank."""

    shape: tuple[int, ...]
    box: Box


@dataclass
class Owner:
    """An object with tensors in it, such as a model: a dict of them, and how it takes one back."""

    thing: Any
    tree: dict[Any, Any]
    install: Callable[[dict[Any, Any]], None]
    # The names of tensors in the tree, with the names in the state of those they are cut like.
    follows: Mapping[str, str] = field(default_factory=dict)
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

    def gather_of(self, thing: Any, name: str) -> Callable[[], Any] | None:
        """Return what gathers the whole state of an object that is divided; None for any other.

        All ranks call what is returned. Raises `ValueError` for a part of a state that cannot be
        gathered, which is `name` in the state.
        """
        return None


def kinds_of(leaves: Mapping[str, Any], tensors: Tensors) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtypes and local shapes of those leaves of a state that are tensors, by their names.

    Raises `ValueError` that names a tensor of a dtype which could be written and never read again.
    """
    kinds = {}
    for name, leaf in leaves.items():
        if not tensors.is_tensor(leaf):
            continue
        try:
            kinds[name] = tensors.kind(leaf)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
        if kinds[name][0] not in DTYPES:
            raise ValueError(
                f"{name!r} is {kinds[name][0]}, which checkpoints do not have: convert it to one "
                f"of {', '.join(sorted(DTYPES))}"
            )
    return kinds
