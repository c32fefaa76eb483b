"""`ps.DistributedOptimizer` for Keras 3: servers make the steps of the user's own optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.warn import warn_user
from hvdlite.keras.framework import attach_state, backend_of, keras, wait_for_programs
from hvdlite.keras.keras_patches import ON_SERVERS, patch_keras
from hvdlite.keras.optimizer_families import (
    KNOWN_TO_LOOK_AT_WHOLE,
    check_variable,
    kind_of,
    treats_elements_alone,
)
from hvdlite.keras.ps.programs import call_in_program, is_in_program, outside_of_programs
from hvdlite.keras.ps.updater import LEARNING_RATE, KerasUpdater
from hvdlite.keras.subclass import save_as
from hvdlite.ps import context
from hvdlite.ps.context import serve
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.table import ABSENT
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.shard import PsRolledBack

TABLE = "optimizer"
# Settings that pushes carry, or that are made use of before them, and so may change.
_FREE = {"name", "learning_rate", "loss_scale_factor"}
_PLAIN = (int, float, str, np.generic, type(None))
_EXCLUDED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")


def DistributedOptimizer(  # noqa: N802
    optimizer: Any,
    mode: str = "sync",
    staleness: int | None = None,
    op: int = ReduceOp.AVERAGE,
    scale: str | None = None,
) -> Any:
    """Let servers make the steps of an optimizer of Keras 3; return it, for ``compile()``.

    A server does not return from here: it serves, and its process ends with the job. In workers it
    is the same object with another class, which keeps no state but the count of steps. Weights are
    those of the first worker from ``build()`` on, which ``fit`` calls; in a loop of your own, call
    ``optimizer.build(model.trainable_variables)`` before the first step.

    - `mode`, `staleness`, `op`, `scale`: as in `hvdlite.torch.ps.DistributedOptimizer`.

    Schedules of the learning rate run in the workers. Other settings are those that the optimizer
    has now: a change is a `ValueError` of the next `build`, ``fit`` or `apply`.

    Raises `NotImplementedError` for another backend of Keras, and `ValueError` for an optimizer
    that is not of Keras 3 or that was built already, for one that looks at whole variables or at
    all gradients, and for clipping by norms, averages of weights, accumulation and loss scaling.
    """
    options = TableOptions.of(mode, staleness, op, scale)
    kind = kind_of(optimizer)
    if kind.package != "keras":
        raise ValueError(f"servers step with an optimizer of Keras 3, not of {kind.package}")
    backend = backend_of(keras)
    _check(optimizer)
    if context.role() == "server":
        if backend == "jax":
            from hvdlite.jax.ps.arrays import stay_on_cpus

            stay_on_cpus()
        serve(lambda _: KerasUpdater(optimizer))
    patch_keras(kind)
    base: Any = type(optimizer)
    metaclass: Any = type(base)
    cls = metaclass(base.__name__, (OnServers, base), {"__doc__": base.__doc__})
    save_as(base, cls, kind)
    object.__setattr__(optimizer, "__class__", cls)
    vars(optimizer)[ON_SERVERS] = _Link(options, _settings_of(optimizer))
    return optimizer


def _check(optimizer: Any) -> None:
    name = type(optimizer).__name__
    objections = {
        "its steps are made by servers already: wrap it once": hasattr(optimizer, ON_SERVERS),
        "a loss scaler decides by all gradients: train in bfloat16": (
            hasattr(optimizer, "inner_optimizer")
        ),
        "it gives each variable an optimizer of its own, and servers step by one: give one for all "
        "variables": hasattr(optimizer, "optimizers"),
        "it is built already: wrap it before": getattr(optimizer, "built", True),
        **_refusals(optimizer),
    }
    for reason, applies in objections.items():
        if applies:
            raise ValueError(f"{name}: {reason}")
    looks = any(cls.__name__.lower() in KNOWN_TO_LOOK_AT_WHOLE for cls in type(optimizer).__mro__)
    if looks or not treats_elements_alone(optimizer):
        raise ValueError(
            f"{name} looks at whole variables, and a server has parts of them: give an optimizer "
            "that treats each element on its own, as SGD and Adam do"
        )


def _refusals(optimizer: Any) -> dict[str, bool]:
    """Return why its settings may be none that servers can step with, and whether they are so."""
    return {
        "clipnorm looks at whole variables: use clipvalue, or clip before apply()": (
            optimizer.clipnorm is not None
        ),
        "global_clipnorm looks at all gradients: use clipvalue, or clip before apply()": (
            optimizer.global_clipnorm is not None
        ),
        "use_ema keeps averages of weights, which stay on the servers": optimizer.use_ema,
        "gradient_accumulation_steps: add gradients up before apply()": bool(
            optimizer.gradient_accumulation_steps
        ),
        "variables are excluded from weight decay by name, which shards do not have": any(
            getattr(optimizer, each, None) for each in _EXCLUDED
        ),
    }


def _settings_of(optimizer: Any) -> dict[str, Any]:
    """Return attributes that the configuration has, too, with their values."""
    try:
        names = optimizer.get_config().keys()
    except (TypeError, NotImplementedError):  # It has none of its own.
        names = keras.optimizers.Optimizer.get_config(optimizer).keys()
    found = {
        name: value
        for name, value in vars(optimizer).items()
        if name.lstrip("_") in names - _FREE and isinstance(value, _PLAIN)
    }
    return found | dict.fromkeys(_EXCLUDED)


def _check_settings(optimizer: Any) -> None:
    """Raise ValueError for a setting that has changed since it was wrapped: servers know of none.

    It takes about 2 microseconds, so that each step can do it.
    """
    now = vars(optimizer)
    for name, was in _link_of(optimizer).settings.items():
        value = now.get(name)
        if value != was and (value or was):  # None of 0 and None does anything.
            found = _refusals(optimizer).items()
            remedy = next((reason for reason, applies in found if applies), "set it before")
            raise ValueError(
                f"{type(optimizer).__name__}: {name.lstrip('_')} is {value!r}, and was {was!r} "
                f"when ps.DistributedOptimizer gave the optimizer to the servers: {remedy}"
            )


class OnServers:
    """The base class that is put before the class of the optimizer, in workers."""

    @property
    def finished_steps(self) -> int:
        """The number of steps that this worker has finished; not 0 for one that has returned."""
        wait_for_programs()
        return _link_of(self).table.clock

    def build(self, variables: Any) -> None:
        """Take part with these variables, and give them the weights of the servers."""
        optimizer: Any = self
        _check_settings(optimizer)
        if not optimizer.built:
            # Not that of the optimizer, whose state is on the servers.
            keras.src.optimizers.base_optimizer.BaseOptimizer.build(optimizer, list(variables))
            with outside_of_programs():
                _link_of(self).begin(list(variables))
                _link_of(self).table.on_load = self._take_loaded
                optimizer.iterations.assign(self.finished_steps)

    def rollback_teller(self) -> Any:
        """Return a callback that lets ``fit`` raise the `PsRolledBack` of a step."""
        return _RollbackTeller(self)

    def _take_loaded(self) -> None:
        """Have the weights that are on the servers, and count on: schedules look at the count."""
        optimizer: Any = self
        link = _link_of(self)
        attach_state(link.model())  # During an epoch only the step may have weights.
        link.pull()
        optimizer.iterations.assign(link.table.clock + link.table.steps_before)

    def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
        """Push gradients, and pull the weights that the next step needs."""
        optimizer: Any = self
        _check_settings(optimizer)
        is_late = not optimizer.built and trainable_variables is not None and not is_in_program()
        if is_late:
            variables = list(trainable_variables)
            before = [_array(variable) for variable in variables]
            self.build(variables)
            if any((old != _array(new)).any() for old, new in zip(before, variables, strict=True)):
                raise ValueError(
                    "gradients of other weights than those on the servers: call "
                    "optimizer.build(model.trainable_variables) before the first step"
                )
        return super().apply(grads, trainable_variables)  # type: ignore[misc]

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        """Replace the step of Keras, which comes after it has looked at the arguments."""
        optimizer: Any = self
        link = _link_of(self)
        by_index = {
            optimizer._get_variable_index(variable): gradient
            for variable, gradient in zip(trainable_variables, grads, strict=True)
        }
        gradients = [
            keras.ops.cast(
                keras.ops.convert_to_tensor(by_index[index], sparse=False), variable.dtype
            )
            if index in by_index
            else keras.ops.zeros(variable.shape, variable.dtype)
            for index, variable in enumerate(link.variables)
        ]
        absent = [number for number in range(len(gradients)) if number not in by_index]
        try:
            link.step(optimizer._get_current_learning_rate(), gradients, absent)
        except PsRolledBack:
            self._take_loaded()
            raise


class _RollbackTeller(keras.callbacks.Callback):
    """Raises the `PsRolledBack` of a step out of ``fit``.

    A program would make an error of its own of it, and one of JAX would lose its variables. So it
    gets the weights to which the servers have gone back, and pushes nothing more.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__()
        self._optimizer = optimizer

    def on_train_begin(self, logs: Any = None) -> None:
        _check_settings(self._optimizer)  # Steps that were compiled before do not.
        link = _link_of(self._optimizer)
        link.is_told = True
        # Weights that have changed since the last step: the next one undoes it.
        if self._optimizer.built and (
            name := link.table.first_changed(map(_array, link.variables))
        ):
            warn_user(context.CHANGED.format(name, "model.load_weights()"))

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        link = _link_of(self._optimizer)
        if link.rolled_back is not None:
            self._optimizer._take_loaded()
            error, link.rolled_back, link.is_told = link.rolled_back, None, False
            raise error

    def on_train_end(self, logs: Any = None) -> None:
        wait_for_programs()
        self.on_train_batch_end(0)
        _link_of(self._optimizer).is_told = False


class _Link:
    table: RemoteTable

    def __init__(self, options: TableOptions, settings: Mapping[str, Any]) -> None:
        self._options = options
        self.settings = settings  # Of the optimizer, as servers have it.
        self.is_told = False  # A `_RollbackTeller` is at work.
        self.rolled_back: PsRolledBack | None = None  # Of which it has not told yet.
        self.model: Callable[[], Any] = lambda: None  # The one that `fit` trains.
        self.variables: list[Any] = []
        self._arrays: list[Array] = []

    def begin(self, variables: list[Any]) -> None:
        """Declare the table, and pull its values.

        Raises ValueError for a second optimizer, and for variables of which servers step over parts
        alone.
        """
        for variable in variables:
            check_variable(variable, "the parameter server", "leave it out, or train by allreduce")
        context.worker().begin_optimizer()
        self.variables = variables
        self._arrays = [_array(variable) for variable in variables]
        specs = [
            TensorSpec(getattr(variable, "path", variable.name), array.dtype.name, array.shape)
            for variable, array in zip(variables, self._arrays, strict=True)
        ]
        flat = [array.reshape(-1) for array in self._arrays]
        self.table = context.worker().declare(TABLE, specs, self._options, lambda: flat)
        self.pull()

    def pull(self) -> None:
        """Give the variables the weights of the servers."""
        self._assign(self._pull())

    def step(self, learning_rate: Any, gradients: Sequence[Any], absent: list[int]) -> None:
        """Push gradients and pull weights, at once or each time that a program runs.

        Those of the variables `absent` are zeros: no gradient is there.
        """
        if is_in_program():
            step = partial(self._step_of_program, absent)
            self._assign(call_in_program(step, learning_rate, gradients))
            return
        arrays = [np.asarray(keras.ops.convert_to_numpy(each)) for each in gradients]
        rate = np.asarray(keras.ops.convert_to_numpy(learning_rate))
        self._assign(self._push_and_pull(absent, rate, *arrays))

    def _push_and_pull(self, absent: list[int], rate: Any, *gradients: Array) -> list[Array]:
        body: dict[str, Any] = {"numbers": [{LEARNING_RATE: float(rate)}]}
        if absent:
            body[ABSENT] = absent
        flat = [np.ascontiguousarray(each).reshape(-1) for each in gradients]
        try:
            self.table.push(flat, body)
            return self._pull()
        except PsRolledBack:
            self.table.forget_rollback()
            raise

    def _step_of_program(self, absent: list[int], rate: Any, *gradients: Array) -> list[Array]:
        try:
            if self.rolled_back is None:
                return self._push_and_pull(absent, rate, *gradients)
        except PsRolledBack as error:
            if not self.is_told:
                raise
            self.rolled_back = error
        return self._pull()

    def _pull(self) -> list[Array]:
        found = [np.empty_like(array) for array in self._arrays]
        self.table.pull([array.reshape(-1) for array in found])
        return found

    def _assign(self, values: Sequence[Any]) -> None:
        for variable, value in zip(self.variables, values, strict=True):
            variable.assign(keras.ops.reshape(value, variable.shape))


def _link_of(optimizer: Any) -> _Link:
    link: _Link = vars(optimizer)[ON_SERVERS]
    return link


def _array(variable: Any) -> Array:
    return np.array(variable.numpy())
