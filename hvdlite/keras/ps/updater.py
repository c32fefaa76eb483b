"""What a server makes of an optimizer of Keras 3: it steps over the server's flat blocks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.checkpoint.tensors import COUNTED
from hvdlite.keras.framework import keras
from hvdlite.ps.layouts.blocks import Array

LEARNING_RATE = "learning_rate"
_BLOCK = "block"
_OF_BLOCK = re.compile(rf"{_BLOCK}(?P<number>\d+)_(?P<name>.+)")


class KerasUpdater:
    """An `Updater` with the user's own optimizer, whose variables are the blocks of this server."""

    def __init__(self, optimizer: Any) -> None:
        self._first = optimizer
        self._optimizer: Any = None
        self._learning_rate = 0.0
        self._variables: list[Any] = []
        self._left: Sequence[Sequence[slice]] = ()  # What the next step leaves as it is.

    def begin(self, values: Sequence[Array]) -> None:
        """Begin: an optimizer of Keras is built once, so each table, and each load, has one.

        The copies are of the user's own class.
        """
        try:
            self._optimizer = type(self._first).from_config(self._first.get_config())
        except (TypeError, NotImplementedError):  # Its configuration does not make another one.
            if self._first.built:
                raise ValueError(
                    f"{type(self._first).__name__} cannot begin anew on other servers or from a "
                    "checkpoint: let its get_config() have all that its constructor takes"
                ) from None
            self._optimizer = self._first
        self._variables = [
            keras.Variable(array, dtype=array.dtype.name, name=f"{_BLOCK}{number}")
            for number, array in enumerate(values)
        ]
        # Schedules run on the workers, which say with each push what the rate is.
        self._optimizer.learning_rate = self._rate
        self._optimizer.loss_scale_factor = None  # Workers have divided by it.
        self._optimizer.build(self._variables)

    def _rate(self) -> Any:
        """Return the rate as Keras has it: TensorFlow would round a number of Python to float32."""
        wide = keras.backend.floatx() == "float64"
        return keras.ops.convert_to_tensor(self._learning_rate, "float64" if wide else "float32")

    def values(self) -> list[Array]:
        return [_array(variable) for variable in self._variables]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        if numbers:
            self._learning_rate = numbers[0][LEARNING_RATE]
        kept, self._left = self._before(self._left), ()
        if self._variables:
            self._optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients])
        for variable, before, spans in kept:
            now = _array(variable)
            for span in spans:
                now[span] = before[span]
            variable.assign(now)

    def leave(self, spans: Sequence[Sequence[slice]]) -> None:
        """See `LeavesOut`: each element is on its own, so that it is put back after the step."""
        self._left = spans

    def _before(self, left: Sequence[Sequence[slice]]) -> list[tuple[Any, Array, Sequence[slice]]]:
        """Return the blocks of which something is left as it is, with their slots, as they are."""
        own = {f"{number}": variable for number, variable in enumerate(self._variables)}
        found = [*own.items()] if left else []
        for variable in self._optimizer.variables if left else ():
            match = _OF_BLOCK.fullmatch(variable.name)
            if match is not None and variable.shape == own[match["number"]].shape:
                found.append((match["number"], variable))
        return [
            (variable, _array(variable), left[int(number)])
            for number, variable in found
            if left[int(number)]
        ]

    def state(self) -> dict[str, Array]:
        """Return it by ``BLOCK.NAME``; what is one for all blocks, each of them has."""
        return {name: _array(variable) for name, variable in self._named()}

    def load(self, state: Mapping[str, Array]) -> None:
        for name, variable in self._named():
            if name in state:
                variable.assign(state[name].reshape(variable.shape))

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Yield the variables of the optimizer by their names: Keras begins them with the block's.

        One that was given none, as Nadam's product, Keras names by a count over all that the
        process has made: here it is counted in its optimizer.
        """
        count = itertools.count()
        for variable in self._optimizer.variables:
            own = _OF_BLOCK.fullmatch(variable.name)
            if own is not None:
                yield f"{own['number']}.{own['name']}", variable
                continue
            name = variable.name
            if COUNTED.fullmatch(name):
                name = f"variable {next(count)}"
            for number in range(len(self._variables)):
                yield f"{number}.{name}", variable


def _array(variable: Any) -> Array:
    return np.array(keras.ops.convert_to_numpy(variable.value))
