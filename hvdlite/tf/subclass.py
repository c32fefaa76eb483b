"""How a tape or an optimizer of TensorFlow becomes a distributed one of the same class."""

from __future__ import annotations

from typing import Any


def wrap(mixin: type, wrapped: Any) -> Any:
    """The object once more, as an instance of a new class that is derived from `mixin` and its own.

    Both are one: they share all their attributes. `mixin` has ``__slots__`` for those that the
    wrapped one shall not have, ``_wrapped`` among them.
    """
    base = type(wrapped)
    same = {"__doc__": base.__doc__, "__module__": base.__module__}
    cls: Any = type(base.__name__, (mixin, base), same)
    distributed = object.__new__(cls)
    distributed.__dict__ = wrapped.__dict__
    distributed._wrapped = wrapped
    return distributed
