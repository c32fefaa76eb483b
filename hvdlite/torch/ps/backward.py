"""Gradients that are sent to servers while backward computes those of the layers before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from hvdlite.ps.layouts.blocks import Array
from hvdlite.torch.ps.arrays import flat_array_of, is_plain


class Early(Protocol):
    """What takes gradients before their push."""

    def push_early(self, tensor: int, gradient: Callable[[], Array]) -> None:
        """Take the flat gradient of a tensor, which the push may find changed."""


class BackwardFollower:
    """Passes each gradient on when `passes` backward passes have added to it.

    The order is that in which backward has them: the last layers first. Where more passes come than
    `passes`, or something else changes gradients, the push itself finds it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], table: Early, passes: int) -> None:
        self._table, self._passes = table, passes
        self._counts = [0] * len(parameters)
        for number, parameter in enumerate(parameters):
            if parameter.requires_grad:
                register: Any = parameter.register_post_accumulate_grad_hook
                weakref.finalize(self, register(_hook(weakref.ref(self), number)).remove)

    def end_step(self) -> None:
        """Take note that the gradients are pushed."""
        self._counts = [0] * len(self._counts)

    def note(self, number: int, parameter: torch.Tensor) -> None:
        """Take note of a pass that has added to a gradient, in the thread of backward."""
        self._counts[number] += 1
        gradient = parameter.grad
        if self._counts[number] != self._passes or gradient is None or gradient.is_sparse:
            return
        if is_plain(gradient):  # Others would wait here until they are copied to the host.
            self._table.push_early(number, lambda: flat_array_of(gradient))


def _hook(follower: weakref.ref[BackwardFollower], number: int) -> Callable[[torch.Tensor], None]:
    def note(parameter: torch.Tensor) -> None:
        found = follower()
        if found is not None:
            found.note(number, parameter)

    return note
