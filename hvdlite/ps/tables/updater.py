"""What holds the values of a table on a server: the user's own optimizer, or what only adds.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from hvdlite.ps.layouts.blocks import Array


class Updater(Protocol):
    """Holds the values of a table, one flat array for each block, and changes them."""

    def begin(self, values: Sequence[Array]) -> None:
        """Take values, which the updater may keep."""

    def values(self) -> list[Array]:
        """Return the values, which the next `step` may change."""

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """Make an update; `numbers` are the hyperparameters of each parameter group, or empty.

        The gradients are there until it returns; those that cannot be written are their worker's.
        """

    def state(self) -> dict[str, Array]:
        """Return what belongs to the values, such as momenta."""

    def load(self, state: Mapping[str, Array]) -> None:
        """Take back what `state` has returned."""


class Added:
    """Adds what is pushed to the values."""

    def __init__(self) -> None:
        self._values: list[Array] = []

    def begin(self, values: Sequence[Array]) -> None:
        self._values = [array if array.flags.writeable else array.copy() for array in values]

    def values(self) -> list[Array]:
        return self._values

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        for values, pushed in zip(self._values, gradients, strict=True):
            np.add(values, pushed, out=values)

    def state(self) -> dict[str, Array]:
        return {}

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""
