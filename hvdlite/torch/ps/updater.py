"""What a server makes of an optimizer of PyTorch: it steps over the server's flat blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from hvdlite.ps.blocks import Array
from hvdlite.ps.server import TableDescription
from hvdlite.torch.ps.arrays import array_of, tensor_of

NUMBERS = (bool, int, float)


class TorchUpdater:
    """Steps with the user's own optimizer, whose parameters become the blocks of this server.

    Nothing of it is sent or unpickled: the server runs the same script as the workers.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, described: TableDescription) -> None:
        self._optimizer = optimizer
        self._blocks = described.blocks
        self._parameters: list[torch.nn.Parameter] = []
        self._copies: dict[int, Array] = {}

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        self._parameters = [torch.nn.Parameter(tensor_of(array)) for array in values]
        self._optimizer.state.clear()
        for number, group in enumerate(self._optimizer.param_groups):
            group["params"] = [
                parameter
                for parameter, block in zip(self._parameters, self._blocks, strict=True)
                if block.group == number
            ]

    def values(self) -> list[Array]:
        """See `Updater`."""
        return [array_of(parameter) for parameter in self._parameters]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        for group, given in zip(self._optimizer.param_groups, numbers, strict=False):
            group.update(given)
        for number, (parameter, gradient) in enumerate(
            zip(self._parameters, gradients, strict=True)
        ):
            parameter.grad = self._own(number, gradient)
        self._optimizer.step()
        for parameter in self._parameters:
            parameter.grad = None

    def _own(self, number: int, gradient: Array) -> torch.Tensor:
        """Return a tensor that an optimizer may change, in memory that is used again."""
        if not gradient.flags.writeable:
            kept = self._copies.setdefault(number, np.empty_like(gradient))
            np.copyto(kept, gradient)
            gradient = kept
        return tensor_of(gradient)

    def state(self) -> dict[str, Array]:
        """See `Updater`: names are ``BLOCK.KEY``; numbers that are no tensors have 0 dimensions."""
        found = {}
        for number, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{number}.{key}"] = array_of(value)
                elif isinstance(value, NUMBERS):
                    found[f"{number}.{key}.number"] = np.array(value, np.float64)
        return found

    def load(self, state: Mapping[str, Array]) -> None:
        """See `Updater`."""
        for name, array in state.items():
            number, _, key = name.partition(".")
            own = self._optimizer.state[self._parameters[int(number)]]
            if key.endswith(".number"):
                value = array.item()
                own[key.removesuffix(".number")] = int(value) if value.is_integer() else value
            else:
                own[key] = tensor_of(array)


def _are_numbers(values: Sequence[object]) -> bool:
    return bool(values) and all(isinstance(each, NUMBERS) for each in values)


def numbers_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyperparameters of a parameter group that are numbers, or pairs of them."""
    found: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            found[key] = value.item()
        elif isinstance(value, NUMBERS):
            found[key] = value
        elif isinstance(value, (tuple, list)) and _are_numbers(value):
            found[key] = tuple(value)
    return found
