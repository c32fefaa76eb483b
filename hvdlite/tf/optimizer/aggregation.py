"""Accumulation of the gradients of several passes before they are reduced, eager and in graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

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
    """Sums of gradients until the last pass of a step.

    `average` divides their sum by the number of passes. `sparse_as_dense` allows
    `tf.IndexedSlices`, which add up as dense tensors.
    """

    def __init__(self, backward_passes_per_step: int, average: bool, sparse_as_dense: bool) -> None:
        self._passes = Passes(backward_passes_per_step)
        self._divisor = backward_passes_per_step if average else 1
        self._sparse_as_dense = sparse_as_dense
        self._sums: dict[int, tf.Variable] = {}
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

        The sums are those of the gradients, None where there is none. In a graph both are built,
        and return tensors in the same structure. Raises `ValueError` for `tf.IndexedSlices`, unless
        they are to be dense.
        """
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [self._dense(gradients[index]) for index in present]
        sums = [
            self._sum(gradient, variables[index])
            for gradient, index in zip(dense, present, strict=True)
        ]
        self._number = self._passes.next()
        totals = self._passes.in_first(
            self._number,
            lambda: [_read(total.assign(value)) for total, value in zip(sums, dense, strict=True)],
            lambda: [
                _read(total.assign_add(value)) for total, value in zip(sums, dense, strict=True)
            ],
        )

        def with_gaps(divisor: int) -> list[Any]:
            scaled = {index: total / divisor for index, total in zip(present, totals, strict=True)}
            return [scaled.get(index) for index in range(len(gradients))]

        return self.when_due(lambda: due(with_gaps(self._divisor)), lambda: skip(with_gaps(1)))

    def when_due(self, due: Branch, skip: Branch) -> Any:
        """Return ``due()`` if the gradients added last are of the last pass, else ``skip()``."""
        return self._passes.in_last(self._number, due, skip)

    def _sum(self, gradient: tf.Tensor, variable: Any) -> tf.Variable:
        key = key_of(variable)
        if key not in self._sums:
            shape = plain(variable).shape
            self._sums[key] = local_variable(
                lambda: tf.zeros(shape, gradient.dtype), "aggregated_gradient"
            )
        return self._sums[key]

    def _dense(self, gradient: Any) -> tf.Tensor:
        if isinstance(gradient, tf.IndexedSlices) and not self._sparse_as_dense:
            raise ValueError(
                "backward_passes_per_step > 1 adds up dense gradients, and this one is "
                "tf.IndexedSlices: give sparse_as_dense=True"
            )
        return tf.convert_to_tensor(gradient)


def _read(assigned: Any) -> tf.Tensor:
    return tf.convert_to_tensor(assigned)


__all__ = ["Accumulator"]
