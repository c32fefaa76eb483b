"""How an optimizer becomes a distributed one of the same class."""

from __future__ import annotations

from typing import Any, NoReturn

import torch


class Wrapped(torch.optim.Optimizer):
    """What comes before the class of the wrapped optimizer."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Its exchange with other ranks cannot be copied, and a copy without it would go astray."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save its state_dict(), or wrap "
            "a copy of the optimizer that it was made from"
        )


def wrap(mixin: type[Wrapped], optimizer: torch.optim.Optimizer) -> Any:
    """The optimizer once more, with its groups and its state, as an instance of a new class.

    The class has the name of the optimizer's own, and is derived from it.
    """
    base = type(optimizer)
    same = {"__doc__": base.__doc__, "__module__": base.__module__}
    cls: Any = type(base.__name__, (mixin, base), same)
    wrapped: Any = object.__new__(cls)
    for name, value in vars(optimizer).items():
        # A learning rate scheduler puts its own step() in the way of the method.
        if not callable(getattr(cls, name, None)):
            wrapped.__dict__[name] = value
    return wrapped
