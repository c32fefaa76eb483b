"""How an optimizer of Keras becomes a distributed one: it gets a class derived from its own.

The object, its variables and its state stay what they are. Settings stand in the new class, so that
what ``from_config(get_config())`` or ``type(optimizer)(...)`` make of it is distributed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, NoReturn

from hvdlite.keras.gradient_exchange import Exchange, Settings
from hvdlite.keras.optimizer_families import Kind, parts_of

_EXCHANGE = "_hvdlite_exchange"
Method = Callable[..., Any]


class CallableList(list[Any]):
    """Variables, which may also be called for, as it was with the optimizers of Keras 2."""

    def __call__(self) -> CallableList:
        return self


class Distributed:
    """What comes before the class of the wrapped optimizer."""

    _hvdlite_settings: Settings

    @property
    def _agg_helper(self) -> Any:
        """What adds up gradients where several passes make a step; otherwise None."""
        return exchange_of(self).accumulator

    def _allreduce(self, grads: Any, vars: Any) -> list[Any]:
        """The gradients of these variables, reduced over all ranks; nothing is applied."""
        return exchange_of(self).reduce(list(grads), list(vars))

    def register_local_var(self, var: Any) -> None:
        """The gradient of this variable is not reduced from now on: each rank has its own.

        Raises `ValueError` for an optimizer that clips by the norm of all gradients together.
        """
        check_local(self)
        exchange_of(self).local.add(var)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """A copy that Keras makes would be a plain optimizer, which synchronizes nothing."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save the model, or make "
            "another optimizer with from_config(get_config()) and give it the variables"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)


def check_local(optimizer: Any) -> None:
    """Raises `ValueError` for an optimizer that cannot have local variables."""
    if any(getattr(each, "global_clipnorm", None) for each in parts_of(optimizer)):
        raise ValueError(
            "global_clipnorm scales all gradients by one norm. With gradients in it that stay "
            "local, it would be another one on each rank: use clipnorm or clipvalue"
        )


def exchange_of(optimizer: Any) -> Exchange:
    """The exchange of a distributed optimizer; made when it is first needed."""
    state: dict[str, Any] = optimizer.__dict__  # Keras would track what is set as an attribute
    if _EXCHANGE not in state:
        state[_EXCHANGE] = Exchange(optimizer._hvdlite_settings)
    exchange: Exchange = state[_EXCHANGE]
    return exchange


def distribute(optimizer: Any, kind: Kind, exchange: Exchange) -> None:
    """Make it distributed, and what it has inside, with the same exchange."""
    for each in list(parts_of(optimizer)):
        object.__setattr__(each, "__class__", _derived_class(type(each), kind, exchange))
        each.__dict__[_EXCHANGE] = exchange


def _derived_class(base: Any, kind: Kind, exchange: Exchange) -> Any:
    namespace: dict[str, Any] = {
        "__doc__": base.__doc__,
        "_hvdlite_settings": exchange.settings,
    }
    for name, entry in kind.entries.items():
        if hasattr(base, name):
            namespace[name] = exchange.untraced(_entering(getattr(base, name), entry))
    for name in kind.guarded:
        if hasattr(base, name):
            namespace[name] = _guarded(getattr(base, name))
    if isinstance(getattr(base, "variables", None), property):
        namespace["variables"] = property(lambda self: CallableList(base.variables.fget(self)))
    metaclass: Any = type(base)
    cls = metaclass(base.__name__, (Distributed, base), namespace)
    _save_as(base, cls, kind)
    return cls


def _entering(method: Method, entry: Method) -> Method:
    @wraps(method)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return entry(method, exchange_of(self), self, *args, **kwargs)

    return apply


def _guarded(method: Method) -> Method:
    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange_of(self).check(method.__name__)
        return method(self, *args, **kwargs)

    return checked


def _save_as(base: type, cls: type, kind: Kind) -> None:
    """Have Keras save optimizers of the class `cls` as those of the class `base`."""
    saving = f"{kind.package}.src.saving"
    saved = import_module(f"{saving}.serialization_lib").serialize_with_public_class(base)
    cls.__module__ = saved["module"]
    registration = import_module(f"{saving}.object_registration")
    for attribute in ("GLOBAL_CUSTOM_NAMES", "_GLOBAL_CUSTOM_NAMES"):  # of Keras 3, of Keras 2
        names = getattr(registration, attribute, {})
        if base in names:
            names[cls] = names[base]
