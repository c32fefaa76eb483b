"""Operators as they run: calls, and what can be seen of their arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from hvdlite.torch.sharding.rules.rule import Rule


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a call, by its name."""

    name: str


# The kind of a device, whether autocast is enabled for it, and the dtype that it casts to.
Autocast = tuple[str, bool, torch.dtype]


def autocasts() -> tuple[Autocast, ...]:
    """Return how operators are cast where this is called."""
    return tuple(
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in ("cpu", "cuda")
    )


@dataclass(frozen=True)
class Call:
    """An operator as it runs: `operator` is its name in the plan, None for one without inputs.

    `outputs` are the names of its results; `picks` are their places where it returns several.
    `draws`: it draws random numbers. `changes`: the parameter or buffer that it changes in place.
    `updates`: buffers that it changes beside its result. `detached`: it ran while gradients were
    switched off. `bias`: what the next call adds to this product, if the operator can do so, too.
    `autocast`: what `autocasts` had where the module had changed it.
    """

    operator: str | None
    target: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[str, ...]
    picks: tuple[int, ...] = ()
    rule: Rule | None = None
    draws: bool = False
    changes: str | None = None
    updates: tuple[str, ...] = ()
    detached: bool = False
    bias: str | None = None
    autocast: tuple[Autocast, ...] = ()

    @property
    def inputs(self) -> list[str]:
        """The names of the tensors that it takes, in order."""
        return [each.name for each in tree_leaves((self.args, self.kwargs)) if is_ref(each)]


def is_ref(value: Any) -> bool:
    """Return whether an argument of a call is a tensor."""
    return isinstance(value, Ref)


def draws(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws random numbers: a dropout of rate 0 does not."""
    if torch.Tag.nondeterministic_seeded not in getattr(function, "tags", ()):
        return False
    given = {
        argument.name: args[index] if index < len(args) else kwargs.get(argument.name, default)
        for index, argument in enumerate(function._schema.arguments)
        for default in [argument.default_value if argument.has_default_value() else None]
    }
    rates = [
        given[name] for name in ("p", "dropout_p", "dropout") if isinstance(given.get(name), float)
    ]
    switches = [given[name] for name in ("train", "training") if given.get(name) is not None]
    return all(rates) and all(switches)
