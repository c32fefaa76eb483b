"""What a server makes of an optimizer of Keras 3: it steps over the server's flat blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hvdlite.keras.framework import keras
from hvdlite.ps.blocks import Array

LEARNING_RATE = "learning_rate"


class KerasUpdater:
    """Steps with the user's own optimizer, whose variables are the blocks of this server."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._learning_rate = 0.0
        self._variables: list[Any] = []

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        self._variables = [
            keras.Variable(array, dtype=array.dtype.name, name=f"block_{number}")
            for number, array in enumerate(values)
        ]
        # Schedules run on the workers, which say with each push what the rate is.
        self._optimizer.learning_rate = lambda: self._learning_rate
        self._optimizer.build(self._variables)

    def values(self) -> list[Array]:
        """See `Updater`."""
        return [_array(variable) for variable in self._variables]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        if numbers:
            self._learning_rate = numbers[0][LEARNING_RATE]
        if self._variables:
            self._optimizer.apply([keras.ops.convert_to_tensor(each) for each in gradients])

    def state(self) -> dict[str, Array]:
        """See `Updater`: the variables of the optimizer, by their numbers."""
        return {str(number): _array(each) for number, each in enumerate(self._optimizer.variables)}

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""
        for number, variable in enumerate(self._optimizer.variables):
            if str(number) in state:
                variable.assign(state[str(number)].reshape(variable.shape))


def _array(variable: Any) -> Array:
    return np.array(keras.ops.convert_to_numpy(variable.value))
