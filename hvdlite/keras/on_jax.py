"""The parts of a distributed Keras optimizer that know JAX."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.sparse import JAXSparse

from hvdlite.common.gradients.variables import Sources, is_overwritten
from hvdlite.common.gradients.weights_check import WeightsCheck
from hvdlite.common.runtime.current import finder, use
from hvdlite.common.segmentation.strategies import Gradient
from hvdlite.common.tensors.comparison import of_array
from hvdlite.jax import gradients as of_jax
from hvdlite.jax.elastic import is_loss_in_jax as is_loss
from hvdlite.jax.order import forget_programs, wait_for_programs
from hvdlite.jax.programs import is_tracing
from hvdlite.keras.framework import keras

__all__ = [
    "Accumulator",
    "Reducer",
    "compare_variables",
    "forget_programs",
    "is_loss",
    "untraced",
    "wait_for_programs",
]

Branch = Callable[[], Any]


def untraced(function: Any) -> Any:
    """Return the function: JAX may trace it."""
    return function


class _Variables(Sources):
    """Variables of Keras: their values are other arrays after each step, and none during one."""

    def __init__(self) -> None:
        super().__init__(keras.Variable)

    def plain(self, source: Any) -> Any:
        """Return what is given."""
        return source


class Reducer(of_jax.Reducer):
    """Reduces the gradients of variables of Keras, at once or in a program."""

    sources: ClassVar[Sources] = _Variables()
    variable = "keras.Variable"

    def send(
        self, gradients: Mapping[str, Any], sources: Mapping[str, Any],
        groups: Sequence[Sequence[str]],
    ) -> Mapping[str, Any]:  # fmt: skip
        """Reduce; None stays None, as a program cannot learn which gradients other ranks have.

        Raises `TypeError` for a sparse gradient, unless it may become dense.
        """
        wanted = {
            name: dense_of(each, self.reduction.sparse_as_dense)
            for name, each in gradients.items()
            if each is not None
        }
        return {**dict.fromkeys(gradients), **super().send(wanted, sources, groups)}

    def describe(self, name: str, gradient: Any, source: Any) -> Gradient | None:
        """Describe a gradient; None for one that is not there."""
        if gradient is None:
            return None
        return super().describe(name, gradient, self.sources.path_of(source))


def dense_of(gradient: Any, sparse_as_dense: bool) -> Any:
    """Return a dense gradient. Raises `TypeError` for a sparse one, unless it may become dense."""
    if not isinstance(gradient, JAXSparse):
        return gradient
    if not sparse_as_dense:
        raise TypeError(
            f"a gradient is a {type(gradient).__name__}, and with JAX sparse gradients are not "
            "exchanged by their rows: give sparse_as_dense=True"
        )
    return gradient.todense()


def compare_variables(check: WeightsCheck, names: Sequence[str], variables: Sequence[Any]) -> None:
    """Count a step, and compare the variables where it is time to, by these names.

    In a program it does so each time that it runs, which then fails. Raises `RuntimeError`.
    """
    values = [variable.value for variable in variables]

    def compare(*arrays: Any) -> None:
        with use(runtime()):
            pairs = zip(names, arrays, strict=True)
            check.compare(of_array(name, np.asarray(array)) for name, array in pairs)

    def is_due() -> Any:
        with use(runtime()):
            return np.bool_(check.is_due())

    runtime = finder()
    if not is_tracing():
        if is_due():
            compare(*values)
        return
    due = io_callback(is_due, jax.ShapeDtypeStruct((), np.bool_))
    jax.lax.cond(due, lambda: io_callback(compare, None, *values), lambda: None)


class Accumulator:
    """Sums of the gradients of several passes, in variables that a program gets and returns.

    Of variables to overwrite it is the largest gradient, as Keras' own accumulation has it.
    They are beside those of the optimizer, of which a program of Keras takes all.
    """

    # Returns the variables of the optimizer, which a step changes.
    state: Callable[[], Iterable[Any]] = list

    def __init__(self, backward_passes_per_step: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = backward_passes_per_step
        self._divisor = backward_passes_per_step if average else 1
        self._sparse_as_dense = sparse_as_dense
        self._count: Any = None
        self._sums: dict[int, Any] = {}  # by the key of the variable
        self._present: set[int] = set()  # the keys of variables that have had a gradient

    def variables_for(self, sources: Sequence[Any]) -> list[Any]:
        """Return the count of passes and the sums; those that are not there yet are made."""
        if self._count is None:
            self._count = keras.Variable(
                initializer="zeros", shape=(), dtype="int32", trainable=False, name="passes"
            )
        for source in sources:
            if Reducer.sources.key_of(source) not in self._sums:
                self._sums[Reducer.sources.key_of(source)] = keras.Variable(
                    initializer="zeros", shape=source.shape, dtype=source.dtype, trainable=False,
                    name="sum_of_passes",
                )  # fmt: skip
        return [self._count, *self._sums.values()]

    def forget(self) -> None:
        """Begin a step anew, as all ranks of a new world do."""
        for variable in () if self._count is None else [self._count, *self._sums.values()]:
            variable.assign(jnp.zeros(variable.shape, variable.dtype))

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        due: Callable[[list[Any]], Any],
        skip: Callable[[list[Any]], Any],
    ) -> None:
        """Call ``due(sums)`` in the last pass of a step, and ``skip(sums)`` in all others.

        A program has both, and both may change the variables, those of the optimizer, and no other.
        """
        own = self.variables_for(variables)
        keys = [Reducer.sources.key_of(variable) for variable in variables]
        overwritten = {
            key for key, each in zip(keys, variables, strict=True) if is_overwritten(each)
        }
        totals: dict[int, Any] = {}
        for key, gradient in zip(keys, gradients, strict=True):
            total = self._sums[key]
            if gradient is not None:
                self._present.add(key)
                dense = jnp.asarray(dense_of(gradient, self._sparse_as_dense), total.dtype)
                add = jnp.maximum if key in overwritten else jnp.add
                totals[key] = add(total.value, dense)
            elif key in self._present:
                totals[key] = total.value
        number = self._count.value + 1

        def end() -> None:
            sums = {
                key: total if key in overwritten else total / self._divisor
                for key, total in totals.items()
            }
            due([sums.get(key) for key in keys])
            self.forget()

        def go_on() -> None:
            skip([totals.get(key) for key in keys])
            self._count.assign(number)
            for key, total in totals.items():
                self._sums[key].assign(total)

        _either(number == self._passes, end, go_on, [*own, *variables, *self.state()])


def _either(condition: Any, first: Branch, second: Branch, changing: Sequence[Any]) -> None:
    """Call ``first()`` where the condition holds, else ``second()``, in a program as well.

    There each of them is traced, with what it assigns to the variables that are `changing`.
    """
    if not isinstance(condition, jax.core.Tracer):
        first() if condition else second()
        return
    known = list({id(variable): variable for variable in changing}.values())

    def traced(branch: Branch) -> Callable[[], list[Any]]:
        def values() -> list[Any]:
            with keras.StatelessScope([(variable, variable.value) for variable in known]):
                branch()
                return [variable.value for variable in known]

        return values

    results = jax.lax.cond(condition, traced(first), traced(second))
    for variable, value in zip(known, results, strict=True):
        variable.assign(value)
