"""Patches of Keras: methods that handle gradients and state where the optimizer cannot see it.

They are replaced when the first optimizer is wrapped. For models and optimizers that are not
distributed they do what they did before.

- A LossScaleOptimizer, which ``compile()`` puts around an optimizer for mixed precision, skips a
  step in which a gradient has overflowed. It has to look at the reduced gradients: if each rank
  decided for itself, some would wait for others that have skipped the step.
- A model makes its training step. That of TensorFlow cannot have collectives if XLA compiles it.
- An optimizer saves and loads its variables, without those that last only until a step ends.
- `fit` knows where an iteration begins and ends, which the settings may want to have traced.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import cache, partial, wraps
from inspect import signature
from threading import Lock
from typing import Any
from weakref import ref

from hvdlite.common.iterations.following import Following
from hvdlite.common.iterations.live import traces_of_loops
from hvdlite.common.runtime.basics import is_initialized
from hvdlite.keras.framework import backend_of, keras
from hvdlite.keras.gradient_exchange import Exchange
from hvdlite.keras.optimizer_families import Kind, parts_of
from hvdlite.keras.subclass import Distributed, exchange_of, lasting_only

_MADE_FOR = "_hvdlite_exchange"  # The exchange that the training step of a model was made with.
ON_SERVERS = "_hvdlite_on_servers"  # An attribute of optimizers whose steps are made by servers.
_WARNS = Lock()
Method = Callable[..., Any]


def patch_keras(kind: Kind) -> None:
    """Replace the methods of this Keras, once."""
    for name, entry in kind.entries.items():
        if name in vars(kind.loss_scaler_class):
            _replace(kind.loss_scaler_class, name, partial(_scaling, entry))
    _replace(kind.module.Model, "make_train_function", _making_step)
    _replace(kind.module.Model, "fit", _fitting)
    if kind.package == "keras":
        for name in ("save_own_variables", "load_own_variables"):
            _replace(kind.module.optimizers.Optimizer, name, _storing)


def _replace(cls: type, name: str, make: Callable[[Method], Method]) -> None:
    owner = next(base for base in cls.__mro__ if name in vars(base))
    method = vars(owner)[name]
    if not hasattr(method, "_hvdlite"):
        replacement: Any = wraps(method)(make(method))
        replacement._hvdlite = True
        setattr(owner, name, replacement)


def _storing(method: Method) -> Method:
    """Make an optimizer save and load what any optimizer of its class has."""

    def store_own_variables(self: Any, store: Any) -> Any:
        with lasting_only(self):
            return method(self, store)

    return store_own_variables


def _scaling(entry: Any, method: Method) -> Method:
    """Make the entry of a loss scaler reduce for its inner optimizer."""

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = self.inner_optimizer
        if isinstance(inner, Distributed):
            exchange = exchange_of(inner)
            active = exchange.settings.reduction.active
            if active and exchange.local and getattr(self, "dynamic", True):
                raise ValueError(
                    "a LossScaleOptimizer skips a step when any gradient has overflowed, and "
                    "gradients of local variables are not the same on all ranks: use a fixed scale "
                    "(loss_scale_factor and compile(auto_scale_loss=False), with Keras 2 "
                    "dynamic=False)"
                )
            exchange.called_by(self)
            return entry(method, exchange, self, *args, **kwargs)
        if any(isinstance(part, Distributed) for part in parts_of(inner)):
            raise RuntimeError(
                "a LossScaleOptimizer would skip steps by the gradients of this rank alone: wrap "
                "the LossScaleOptimizer, not what it has inside"
            )
        return method(self, *args, **kwargs)

    return apply


def _making_step(method: Method) -> Method:
    """Replace ``Model.make_train_function()``."""

    def make_train_function(self: Any, force: bool = False) -> Any:
        _meet_server_optimizer(self)
        steps_are_compiled = (
            exchange_of(part)
            for part in parts_of(getattr(self, "optimizer", None))
            if isinstance(part, Distributed) and part._hvdlite_settings.backend != "torch"
        )
        exchange = next(steps_are_compiled, None)
        if exchange is not None and exchange.settings.reduction.active:
            if self.jit_compile and exchange.settings.backend == "tensorflow":
                _warn_once()
                self.jit_compile = False
            force = force or _is_stale(self, exchange)
            vars(self)[_MADE_FOR] = exchange
        return method(self, force)

    return make_train_function


def _meet_server_optimizer(model: Any) -> None:
    """Let a model train whose optimizer steps on servers, which XLA of TensorFlow cannot call."""
    parts = list(parts_of(getattr(model, "optimizer", None)))
    if not any(hasattr(part, ON_SERVERS) for part in parts):
        return
    if hasattr(parts[0], "optimizers"):
        raise ValueError(
            f"{type(parts[0]).__name__} gives each variable an optimizer of its own, and servers "
            "step by one: compile() with one whose steps are made by servers, for all variables"
        )
    if len(parts) > 1:
        raise ValueError(
            "a LossScaleOptimizer around an optimizer whose steps are made by servers skips steps "
            "that the servers wait for: compile(auto_scale_loss=False), or train in bfloat16"
        )
    vars(parts[0])[ON_SERVERS].model = ref(model)
    if model.jit_compile and backend_of(keras) != "jax":
        _warn_once()
        model.jit_compile = False


def _fitting(method: Method) -> Method:
    """Replace ``Model.fit()``, whose iterations are traced where the settings ask for it.

    After a reset no epoch may be left; Keras 2 would raise an error.
    """

    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        _meet_server_optimizer(self)  # Before `fit` builds the optimizer, which calls the servers.
        given: Any = kwargs.get("callbacks")
        if _is_elastic(given):
            _refuse_backups(given)
            if kwargs.get("epochs") == 0:
                kwargs |= {"epochs": 1, "initial_epoch": 1}  # None either, and Keras 2 takes it.
        parts = [*parts_of(getattr(self, "optimizer", None))]
        added: list[Any] = [part.rollback_teller() for part in parts if hasattr(part, ON_SERVERS)]
        traces: list[Following] = []
        if any(isinstance(part, Distributed) for part in parts) and is_initialized():
            traces = traces_of_loops()
        if not traces and not added:
            return method(self, *args, **kwargs)
        from hvdlite.keras.callbacks import IterationTraceCallback

        call = signature(method).bind(self, *args, **kwargs)
        added += [IterationTraceCallback(trace) for trace in traces]
        callbacks: Any = call.arguments.get("callbacks")
        if hasattr(callbacks, "append") and not isinstance(callbacks, list):  # A CallbackList.
            for callback in added:
                callbacks.append(callback)
        else:
            if not isinstance(callbacks, (list, tuple)):
                callbacks = [callbacks] if callbacks else []
            call.arguments["callbacks"] = [*callbacks, *added]
        return method(*call.args, **call.kwargs)

    return fit


def _is_elastic(callbacks: Any) -> bool:
    from hvdlite.keras.callbacks.elastic import StateCallback

    return isinstance(callbacks, (list, tuple)) and any(
        isinstance(callback, StateCallback) for callback in callbacks
    )


def _refuse_backups(callbacks: Iterable[Any]) -> None:
    """Raise ValueError for a `BackupAndRestore`, of Keras 2 or 3."""
    if "BackupAndRestore" in {base.__name__ for each in callbacks for base in type(each).__mro__}:
        raise ValueError(
            "BackupAndRestore beside callbacks of an elastic state: after a reset it would replace "
            "what all ranks have committed by its last backup, on its rank alone. Leave it out, as "
            "commits resume within the job; a job that begins anew loads a checkpoint before its "
            "state is made"
        )


def _is_stale(model: Any, exchange: Exchange) -> bool:
    """Return whether Keras made the step before the optimizer was wrapped, and would reuse it."""
    step = getattr(model.train_function, "python_function", model.train_function)
    made_by_keras = getattr(step, "__module__", "").startswith(("keras.", "tf_keras."))
    return made_by_keras and vars(model).get(_MADE_FOR) is not exchange


def _warn_once() -> None:
    with _WARNS:  # Models may be trained in several threads, and a cache alone lets both warn.
        _warn_of_xla()


@cache
def _warn_of_xla() -> None:
    warnings.warn(
        "XLA cannot compile a training step that reduces gradients over ranks: the model is "
        "compiled without it, as with jit_compile=False",
        stacklevel=5,
    )
