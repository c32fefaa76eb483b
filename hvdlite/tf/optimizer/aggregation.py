"""Accumulation of the gradients of several passes before they are reduced, eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdlite.common.gradients.variables import is_overwritten
from hvdlite.tf.variables import key_of, plain

Branch = Callable[[], Any]


def local_variable(initial: Callable[[], tf.Tensor], name: str) -> tf.Variable:
    """Make a variable that is no part of the model: not trained, not saved, not broadcast.

    `initial` makes its first value; a session assigns it when it runs
    ``tf.compat.v1.local_variables_initializer()``.
    """
    with tf.init_scope():
        return tf.compat.v1.Variable(
            initial,
            trainable=False,
            collections=[tf.compat.v1.GraphKeys.LOCAL_VARIABLES],
            use_resource=True,
            name=name,
        )


class Passes:
    """A counter of the passes over a model that make a step."""

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._count: Any = None

    def next(self) -> tf.Tensor:
        """Count one more pass, and return its number in its step, from 0 on."""
        if self._count is None:
            self._count = local_variable(lambda: tf.constant(0), "passes")
        return (tf.convert_to_tensor(self._count.assign_add(1)) - 1) % self._passes

    def forget(self) -> None:
        """Begin a step anew, at once or in the session that is the default one."""
        if self._count is None:
            return
        if tf.executing_eagerly():
            self._count.assign(0)
        else:
            self._count.load(0, tf.compat.v1.get_default_session())

    def in_first(self, number: tf.Tensor, first: Branch, otherwise: Branch) -> Any:
        """Return ``first()`` if a step begins with the pass of this number, else ``otherwise()``.

        Only its inputs order a branch after the operations before it in the program.
        """
        return first() if self._passes == 1 else tf.cond(tf.equal(number, 0), first, otherwise)

    def in_last(self, number: tf.Tensor, last: Branch, otherwise: Branch) -> Any:
        """Return ``last()`` if a step ends with the pass of this number, else ``otherwise()``."""
        if self._passes == 1:
            return last()
        return tf.cond(tf.equal(number, self._passes - 1), last, otherwise)


class Accumulator:
    """Sums of gradients until the last pass of a step, or the largest for variables to overwrite.

    `average` divides their sum by the number of passes. `sparse_as_dense` allows
    `tf.IndexedSlices`, which add up as dense tensors.
    """

    def __init__(self, backward_passes_per_step: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = Passes(backward_passes_per_step)
        self._divisor = backward_passes_per_step if average else 1
        self._sparse_as_dense = sparse_as_dense
        self._sums: dict[int, tf.Variable] = {}
        # The keys of variables that have had a gradient: in this step, or in graphs in any.
        self._present: set[int] = set()
        self._number: Any = None

    def forget(self) -> None:
        """Begin a step anew: its first pass overwrites the sums. See `Passes.forget`."""
        self._passes.forget()

    def add(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        due: Callable[[list[Any]], Any],
        skip: Callable[[list[Any]], Any],
    ) -> Any:
        """Return ``due(sums)`` in the last pass of a step, and ``skip(sums)`` in all others.

        The sums are those of the gradients in all passes, None where none of them had one. In a
        graph both are built, and return tensors in the same structure. Raises `ValueError` for
        `tf.IndexedSlices`, unless they are to be dense.
        """
        dense = [None if each is None else self._dense(each) for each in gradients]
        # Also those without a gradient: a function that is traced later may have one.
        sums = [self._sum(*each) for each in zip(dense, variables, strict=True)]
        keys = [key_of(variable) for variable in variables]
        others = [self._sums[key] for key in self._sums.keys() - {*keys}]
        self._number = self._passes.next()
        if tf.executing_eagerly() and self._number == 0:
            self._present.clear()
        self._present.update(
            key for key, value in zip(keys, dense, strict=True) if value is not None
        )
        overwritten = [is_overwritten(variable) for variable in variables]
        pairs = list(zip(sums, dense, strict=True))

        def begin() -> list[tf.Tensor]:
            cleared = [each.assign(tf.zeros_like(each), read_value=False) for each in others]
            with tf.control_dependencies(cleared):
                return [
                    tf.convert_to_tensor(
                        total.assign(tf.zeros_like(total) if value is None else value)
                    )
                    for total, value in pairs
                ]

        def go_on() -> list[tf.Tensor]:
            return [
                tf.convert_to_tensor(_added(total, value, largest))
                for (total, value), largest in zip(pairs, overwritten, strict=True)
            ]

        totals = self._passes.in_first(self._number, begin, go_on)

        def with_gaps(divisor: int) -> list[Any]:
            sums = [
                total if largest else total / divisor
                for total, largest in zip(totals, overwritten, strict=True)
            ]
            return [
                total if key in self._present else None
                for key, total in zip(keys, sums, strict=True)
            ]

        return self.when_due(lambda: due(with_gaps(self._divisor)), lambda: skip(with_gaps(1)))

    def when_due(self, due: Branch, skip: Branch) -> Any:
        """Return ``due()`` if the gradients added last are of the last pass, else ``skip()``."""
        return self._passes.in_last(self._number, due, skip)

    def _sum(self, gradient: tf.Tensor | None, variable: Any) -> tf.Variable:
        key = key_of(variable)
        if key not in self._sums:
            inner = plain(variable)
            dtype = inner.dtype if gradient is None else gradient.dtype
            self._sums[key] = local_variable(
                lambda: tf.zeros(inner.shape, dtype), "aggregated_gradient"
            )
        return self._sums[key]

    def _dense(self, gradient: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step > 1 adds up dense gradients, and this one is "
                "tf.IndexedSlices: give sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)


def _added(total: tf.Variable, value: tf.Tensor | None, largest: bool) -> Any:
    if value is None:
        return total
    return total.assign(tf.maximum(total, value)) if largest else total.assign_add(value)


__all__ = ["Accumulator"]
