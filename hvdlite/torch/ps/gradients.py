"""The gradients of parameters as flat arrays; many small ones cost little more than one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from hvdlite.ps.layouts.blocks import Array
from hvdlite.torch.ps.arrays import flat_array_of

SMALL_BYTES = 1 << 14  # So small gradients are copied faster than arrays of them are made.
FEW = 8


class Gradients:
    """The gradients of these parameters, step by step."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        small: defaultdict[torch.dtype, list[int]] = defaultdict(list)
        for number, parameter in enumerate(self._parameters):
            if parameter.device.type == "cpu" and parameter.nbytes <= SMALL_BYTES:
                small[parameter.dtype].append(number)
        self._groups = [
            _Group(numbers, [self._parameters[number] for number in numbers])
            for numbers in small.values()
            if len(numbers) >= FEW
        ]

    def arrays(self, scale: torch.Tensor | None) -> list[Array]:
        """Return flat arrays, divided by `scale`: zeros where there is no gradient.

        They count until the gradients change, or until the next call.
        """
        gradients = [parameter.grad for parameter in self._parameters]
        found: list[Array | None] = [None] * len(gradients)
        if scale is None:
            for group in self._groups:
                group.copy(gradients, found)
        return [
            self._one(number, gradients[number], scale) if array is None else array
            for number, array in enumerate(found)
        ]

    def _one(self, number: int, gradient: torch.Tensor | None, scale: torch.Tensor | None) -> Array:
        if gradient is None:
            gradient = torch.zeros_like(self._parameters[number])
        elif gradient.is_sparse:  # Of nn.Embedding(sparse=True).
            gradient = gradient.to_dense()
        if scale is not None:
            gradient = gradient / scale.to(gradient.dtype)
        return flat_array_of(gradient)


class _Group:
    """Parameters of one dtype, and memory for their gradients."""

    def __init__(self, numbers: list[int], parameters: Sequence[torch.Tensor]) -> None:
        self._numbers = numbers
        memory = torch.empty(sum(each.numel() for each in parameters), dtype=parameters[0].dtype)
        pieces = torch.split(memory, [each.numel() for each in parameters])
        self._copies = [
            piece.view(each.shape) for piece, each in zip(pieces, parameters, strict=True)
        ]
        self._arrays = [flat_array_of(piece) for piece in pieces]

    @torch.no_grad()
    def copy(self, gradients: Sequence[torch.Tensor | None], found: list[Array | None]) -> None:
        """Put arrays of the gradients into `found`, unless some are missing or sparse."""
        own = [each for number in self._numbers if (each := gradients[number]) is not None]
        if len(own) == len(self._numbers) and {each.layout for each in own} == {torch.strided}:
            torch._foreach_copy_(self._copies, own)
            for number, array in zip(self._numbers, self._arrays, strict=True):
                found[number] = array
