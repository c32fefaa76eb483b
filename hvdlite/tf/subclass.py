"""The class of a distributed tape or optimizer, derived from the class of the wrapped one."""

from __future__ import annotations

from typing import Any


def wrap(mixin: type, wrapped: Any) -> Any:
    """Return the object as an instance of a new class, derived from `mixin` and its own class.

    Both objects share all attributes. `mixin` has ``__slots__`` for those that the wrapped object
    shall not have, ``_wrapped`` among them.
    """
    base = type(wrapped)
    same = {"__doc__": base.__doc__, "__module__": base.__module__}
    cls: Any = type(base.__name__, (mixin, base), same)
    distributed = object.__new__(cls)
    distributed.__dict__ = wrapped.__dict__
    distributed._wrapped = wrapped
    return distributed
