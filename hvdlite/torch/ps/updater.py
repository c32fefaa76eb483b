"""What a server makes of an optimizer of PyTorch: it steps over the server's flat blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.tables.description import TableDescription
from hvdlite.torch.ps.arrays import array_of, tensor_of

NUMBERS = (bool, int, float)


class TorchUpdater:
    """Steps with the user's own optimizer, whose parameters become the blocks of this server.

    Nothing of it is sent or unpickled: the server runs the same script as the workers.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, described: TableDescription, *, whole: bool = False
    ) -> None:
        """Let `whole` tensors keep their shapes; else each block is one flat parameter."""
        self._optimizer = optimizer
        self._blocks = described.blocks
        self._shapes: list[list[tuple[int, ...]]] = [[(-1,)] for _ in described.blocks]
        if whole:
            shapes = [spec.shape for spec in described.specs]
            first = described.first_key
            self._shapes = [
                [shapes[part.key - first] for part in block.parts] for block in described.blocks
            ]
        self._memory: list[torch.Tensor] = []  # Of each block.
        self._parameters: list[torch.nn.Parameter] = []
        self._copies: dict[int, Array] = {}

    def begin(self, values: Sequence[Array]) -> None:
        """See `Updater`."""
        self._memory = [tensor_of(array) for array in values]
        self._parameters = []
        for group in self._optimizer.param_groups:
            group["params"] = []
        self._optimizer.state.clear()
        for number, block in enumerate(self._blocks):
            for tensor in self._cut(number, self._memory[number]):
                self._parameters.append(torch.nn.Parameter(tensor))
                group = self._optimizer.param_groups[block.group]
                group["params"].append(self._parameters[-1])

    def _cut(self, number: int, block: torch.Tensor) -> list[torch.Tensor]:
        """Return what a block consists of, in memory that they share."""
        shapes = self._shapes[number]
        if shapes == [(-1,)]:
            return [block]
        pieces = torch.split(block, [prod(shape) for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def values(self) -> list[Array]:
        """See `Updater`."""
        return [array_of(block) for block in self._memory]

    def step(self, gradients: Sequence[Array], numbers: Sequence[Mapping[str, Any]]) -> None:
        """See `Updater`."""
        for group, given in zip(self._optimizer.param_groups, numbers, strict=False):
            group.update(given)
        pieces = [
            piece
            for number, gradient in enumerate(gradients)
            for piece in self._cut(number, self._own(number, gradient))
        ]
        for parameter, piece in zip(self._parameters, pieces, strict=True):
            parameter.grad = piece
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
        """See `Updater`: names are ``NUMBER.KEY``, with the numbers of parameters.

        Numbers that are no tensors have 0 dimensions.
        """
        found = {}
        for number, parameter in enumerate(self._parameters):
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    found[f"{number}.{key}"] = array_of(value).reshape(value.shape)
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
