"""The class of a distributed Keras optimizer, derived from the optimizer's own class.

The object, its variables and its state stay what they are. The settings are in the new class, so
that optimizers made by ``from_config(get_config())`` or ``type(optimizer)(...)`` are distributed as
well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from importlib import import_module
from typing import Any, NoReturn

from hvdlite.keras.gradient_exchange import Exchange, Settings
from hvdlite.keras.optimizer_families import Kind, built_variables, parts_of

_EXCHANGE = "_hvdlite_exchange"
Method = Callable[..., Any]


class CallableList(list[Any]):
    """A list of variables that may also be called, as with the optimizers of Keras 2."""

    def __call__(self) -> CallableList:
        return self


class Distributed:
    """The base class that is put before the class of the wrapped optimizer."""

    _hvdlite_settings: Settings

    @property
    def _agg_helper(self) -> Any:
        """The accumulator of gradients if several passes make a step, otherwise None."""
        return exchange_of(self).accumulator

    def _allreduce(self, grads: Any, vars: Any) -> list[Any]:
        """Return the gradients of these variables, reduced over all ranks; apply nothing."""
        return exchange_of(self).reduce(list(grads), list(vars))

    def compression_state(self) -> dict[str, Any]:
        """Return what `compression` remembers on this rank, with numpy arrays, to be pickled.

        Empty for a compressor that remembers nothing. It is part of commits of an elastic
        `KerasState`, and of no saved model.
        """
        state: dict[str, Any] = exchange_of(self).reducer.compression_state()
        return state

    def load_compression_state(self, saved: Mapping[str, Any]) -> None:
        """Take what `compression_state` has returned on this rank of as many, or elsewhere.

        From elsewhere comes what ranks share, and not what this rank has not sent.
        """
        exchange_of(self).reducer.load_compression_state(saved)

    def forget_passes(self) -> None:
        """Begin the passes of a step anew: what they have added up is forgotten."""
        exchange_of(self).forget_passes()

    def register_local_var(self, var: Any) -> None:
        """Do not reduce the gradient of this variable from now on: each rank has its own.

        Raises `ValueError` for an optimizer that clips by the norm of all gradients together.
        """
        check_local(self)
        exchange_of(self).local.add(var)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: a copy that Keras makes would be a plain optimizer, which reduces nothing."""
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: save the model, or make "
            "another optimizer with from_config(get_config()) and give it the variables"
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__reduce_ex__(4)


def check_local(optimizer: Any) -> None:
    """Raise `ValueError` for an optimizer that cannot have local variables."""
    if any(getattr(part, "global_clipnorm", None) for part in parts_of(optimizer)):
        raise ValueError(
            "global_clipnorm scales all gradients by one norm. With gradients in it that stay "
            "local, it would be another one on each rank: use clipnorm or clipvalue"
        )


def exchange_of(optimizer: Any) -> Exchange:
    """Return the exchange of a distributed optimizer, which is made at first use."""
    state: dict[str, Any] = optimizer.__dict__  # Keras would track a plain attribute.
    if _EXCHANGE not in state:
        state[_EXCHANGE] = make_exchange(optimizer._hvdlite_settings)
        state[_EXCHANGE].wrap(optimizer)
    exchange: Exchange = state[_EXCHANGE]
    return exchange


@contextmanager
def lasting_only(optimizer: Any) -> Iterator[None]:
    """Let an optimizer have no variables, within this context, that last only until a step ends."""
    with ExitStack() as stack:
        for part in parts_of(optimizer):
            if isinstance(part, Distributed):
                stack.enter_context(exchange_of(part).lasting_only())
        yield


def make_exchange(settings: Settings) -> Exchange:
    """Return a new exchange."""
    if settings.shard_state:
        from hvdlite.keras.sharded_state import ShardedExchange  # Most jobs never need it.

        return ShardedExchange(settings)
    return Exchange(settings)


def distribute(optimizer: Any, kind: Kind, exchange: Exchange) -> None:
    """Make an optimizer and its inner optimizers distributed, with the same exchange."""
    for part in list(parts_of(optimizer)):
        object.__setattr__(part, "__class__", _derived_class(type(part), kind, exchange))
        part.__dict__[_EXCHANGE] = exchange
    exchange.wrap(optimizer)


def _derived_class(base: Any, kind: Kind, exchange: Exchange) -> Any:
    namespace: dict[str, Any] = {
        "__doc__": base.__doc__,
        "_hvdlite_settings": exchange.settings,
    }
    for name, entry in kind.entries.items():
        if hasattr(base, name):
            namespace[name] = exchange.untraced(_entering(getattr(base, name), entry))
    for name, entry in exchange.more_entries.items():
        namespace[name] = exchange.untraced(_entering(getattr(base, name, None), entry))
    for name in kind.guarded:
        if hasattr(base, name):
            namespace[name] = _guarded(getattr(base, name))
    if isinstance(getattr(base, "variables", None), property):
        namespace["variables"] = property(partial(_variables, base.variables.fget))
    metaclass: Any = type(base)
    cls = metaclass(base.__name__, (Distributed, base), namespace)
    save_as(base, cls, kind)
    return cls


def _variables(method: Method, optimizer: Any) -> CallableList:
    variables = CallableList(method(optimizer))
    if optimizer._hvdlite_settings.passes > 1:
        built = built_variables(optimizer)
        variables += exchange_of(optimizer).passing_variables(optimizer, built)
    return variables


def _entering(method: Method | None, entry: Method) -> Method:
    @wraps(entry if method is None else method)
    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange = exchange_of(self)
        exchange.called_by(self)
        return entry(method, exchange, self, *args, **kwargs)

    return apply


def _guarded(method: Method) -> Method:
    @wraps(method)
    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        exchange_of(self).check(method.__name__)
        return method(self, *args, **kwargs)

    return checked


def save_as(base: type, cls: type, kind: Kind) -> None:
    """Have Keras save optimizers of the class `cls` as those of the class `base`."""
    saving = f"{kind.package}.src.saving"
    saved = import_module(f"{saving}.serialization_lib").serialize_with_public_class(base)
    cls.__module__ = saved["module"]
    registration = import_module(f"{saving}.object_registration")
    for attribute in ("GLOBAL_CUSTOM_NAMES", "_GLOBAL_CUSTOM_NAMES"):  # of Keras 3, of Keras 2
        names = getattr(registration, attribute, {})
        if base in names:
            names[cls] = names[base]
