"""A local tensor that goes from one layout to another, and its gradient that comes back.

Gradients have the layout of their tensors, and are complete: an operator that computes summands of
a gradient on several ranks says so, and the sum is taken on the way back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from hvdlite.common.layouts.exchange import along, exchange, part_of, same_parts, scattered
from hvdlite.common.layouts.layout import Box, Layout
from hvdlite.torch.autograd import untraced
from hvdlite.torch.sharding.collectives import Collectives

# Positions of a device matrix along which ranks hold summands.
Summed = tuple[int, ...]


class Transfer:
    """One direction: sums what is held along some axes, and cuts it otherwise."""

    def __init__(
        self,
        shape: tuple[int, ...],
        held: Layout,
        summed: Summed,
        wanted: Layout,
        collectives: Collectives,
    ) -> None:
        self._collectives = collectives
        rank = collectives.rank
        self.group = along(held.device_matrix, summed, rank) if summed else (rank,)
        self._parts: list[Box] = []
        if len(self.group) > 1 and scattered(held, summed, wanted, shape):
            self._parts = [part_of(held, wanted, shape, rank, each) for each in self.group]
        self._exchange = exchange(held, wanted, shape, rank)
        own = [stop - start for start, stop in held.box(shape, rank)]
        self._sent_along = _even_along(self._parts or self._exchange.sends, own)
        self._came_along = _even_along(self._exchange.receives, self._exchange.shape)
        self.stays = same_parts(held, wanted, shape)
        self.is_nothing = self.stays and len(self.group) == 1
        # Whether nobody else has what this is run with, so that sums may take its memory.
        self.owns = False
        if len(self.group) > 1:
            collectives.join(self.group)
        if not self._parts and not self._exchange.is_local:
            collectives.join(self._exchange.members)

    def run(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part."""
        if self._parts:
            sent = self._in_a_row(self._parts, tensor)
            return self._collectives.reducescatter(sent, self.group).view(self._exchange.shape)
        if len(self.group) > 1:
            tensor = self._collectives.allreduce(tensor, self.group, owned=self.owns)
        if self.stays:
            return tensor
        steps = self._exchange
        if steps.is_local:
            (box,) = steps.sends
            if box is None:
                return tensor.new_empty(steps.shape)
            return _part(tensor, box).contiguous()
        if steps.is_gather:
            came = self._collectives.allgather(tensor.contiguous().view(-1), steps.members)
        else:
            sent = self._in_a_row(steps.sends, tensor)
            receives = [_count(each) for each in steps.receives]
            sends = [_count(each) for each in steps.sends]
            came = self._collectives.alltoall(sent, sends, receives, steps.members)
        return self._put_together(came)

    def _in_a_row(self, boxes: Sequence[Box | None], tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of parts of a tensor, each copied once, whatever its strides."""
        along = self._sent_along
        if along is not None:
            shape = tensor.shape
            split = tensor.view(
                *shape[:along], len(boxes), shape[along] // len(boxes), *shape[along + 1 :]
            )
            return split.movedim(along, 0).reshape(-1)
        sizes = [_count(each) for each in boxes]
        found = tensor.new_empty(sum(sizes))
        for place, box in zip(torch.split(found, sizes), boxes, strict=True):
            if box is not None:
                part = _part(tensor, box)
                place.view(part.shape).copy_(part)
        return found

    def _put_together(self, came: torch.Tensor) -> torch.Tensor:
        steps, along = self._exchange, self._came_along
        if along is not None:
            shape, n = list(steps.shape), len(steps.receives)
            shape[along] //= n
            return came.view(n, *shape).movedim(0, along).flatten(along, along + 1)
        whole = came.new_empty(steps.shape)
        start = 0
        for box in steps.receives:
            if box is not None:
                part = came[start : start + _count(box)]
                _part(whole, box).copy_(part.view([b - a for a, b in box]))
                start += _count(box)
        return whole


def _part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    for dimension, (start, stop) in enumerate(box):
        if stop - start != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, start, stop - start)
    return tensor


def _even_along(boxes: Sequence[Box | None], shape: Sequence[int]) -> int | None:
    """Return the dimension along which parts make up a tensor, equal ones in this order; or None.

    All of them are then copied at once: one by one takes several calls for each rank.
    """
    for dimension, length in enumerate(shape):
        size = length // len(boxes)
        rows = [
            [(i * size, (i + 1) * size) if d == dimension else (0, n) for d, n in enumerate(shape)]
            for i in range(len(boxes))
        ]
        if size * len(boxes) == length and [each and list(each) for each in boxes] == rows:
            return dimension
    return None


def _count(box: Box | None) -> int:
    count = 0 if box is None else 1
    for start, stop in box or ():
        count *= stop - start
    return count


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, there: Transfer, back: Transfer) -> torch.Tensor:
        ctx.back = back
        found = tensor.view_as(tensor) if there.is_nothing else there.run(tensor)
        if there.owns and found is tensor:
            ctx.mark_dirty(tensor)
        return found

    @staticmethod
    @once_differentiable  # Exchanges of gradients have none themselves.
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None, None]:
        (gradient,) = gradients
        return gradient if ctx.back.is_nothing else ctx.back.run(gradient), None, None


_moved: Callable[..., torch.Tensor] = untraced(_Moved.apply)


class Move(torch.nn.Module):
    """A tensor of `shape` from `held` to `wanted`, and its gradient back.

    `summed`: positions of the device matrix of `held` along which ranks hold summands of it.
    `gradient_summed`: the same of `wanted`, for the gradient.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        held: Layout,
        summed: Summed,
        wanted: Layout,
        gradient_summed: Summed,
        collectives: Collectives,
    ) -> None:
        super().__init__()
        self._there = Transfer(shape, held, summed, wanted, collectives)
        self._back = Transfer(shape, wanted, gradient_summed, held, collectives)

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the tensor under the other layout."""
        return _moved(tensor, self._there, self._back)

    def own(self, tensor: bool, gradient: bool) -> None:
        """Tell whether nobody else has the tensor, and its gradient, that come in."""
        self._there.owns, self._back.owns = tensor, gradient

    @property
    def sums_gradient_among(self) -> tuple[int, ...]:
        """The ranks among which the gradient is summed, where nothing else is done; or none."""
        return self._back.group if self._there.is_nothing and self._back.stays else ()


class _JoinedSums(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, collectives: Collectives, members: tuple[int, ...], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.sum = collectives.allreduce, members
        found = tuple(each.view_as(each) for each in tensors)
        trained = ctx.needs_input_grad[2:]
        ctx.mark_non_differentiable(
            *(each for each, trains in zip(found, trained, strict=True) if not trains)
        )
        return found

    @staticmethod
    @once_differentiable  # Exchanges of gradients have none themselves.
    def backward(ctx: Any, *gradients: Any) -> Any:
        allreduce, members = ctx.sum
        known = [each for each in gradients if each is not None]
        if not known:
            return None, None, *gradients
        flat = torch.cat([each.reshape(-1) for each in known])
        sums = allreduce(flat, members, owned=True).split([each.numel() for each in known])
        left = iter(sums)
        return (
            None,
            None,
            *(None if each is None else next(left).view(each.shape) for each in gradients),
        )


_joined_sums: Callable[..., tuple[torch.Tensor, ...]] = untraced(_JoinedSums.apply)


class JoinedSums(torch.nn.Module):
    """Tensors as they are, of whose gradients one exchange takes the sums when all are there."""

    def __init__(self, members: tuple[int, ...], collectives: Collectives) -> None:
        super().__init__()
        self._members, self._collectives = members, collectives

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors."""
        return _joined_sums(self._collectives, self._members, *tensors)
