"""A rank's share of the batch: a plain tensor outside of a sharded part, cut anew inside of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.common.runtime.basics import size
from hvdlite.torch import mpi_ops
from hvdlite.torch.sharding.dtensor import Shard
from hvdlite.torch.sharding.inside import whole_placements


def check_shares(tensors: Sequence[torch.Tensor], mesh: Any) -> None:
    """Raise `ValueError` on all ranks if their shares differ: DTensor would not notice."""
    # The numbers tell where they end, so that no two lists of shapes have the same in a row.
    own = [len(tensors), *(n for each in tensors for n in (each.ndim, *each.shape))]
    of_ranks = _gathered(own, mesh)
    if of_ranks != own * mesh.size():
        raise ValueError(
            f"ranks call a sharded part with tensors of other shapes, by rank of the mesh: "
            f"{'; '.join(_shapes(of_ranks))}: each rank gives a share of the batch of equal size"
        )


def _shapes(numbers: Sequence[int]) -> Iterator[str]:
    """Yield the shapes that the numbers of each rank say."""
    left = iter(numbers)
    for count in left:
        shapes = [tuple(itertools.islice(left, next(left))) for _ in range(count)]
        yield ", ".join(map(str, shapes)) or "no tensor"


def _gathered(numbers: list[int], mesh: Any) -> list[int]:
    """Return the numbers of all ranks of a mesh in a row."""
    if mesh.size() == size():
        held = torch.tensor(numbers, dtype=torch.int64)
        found: list[int] = mpi_ops.allgather(held, "sharding.shares").tolist()
        return found
    for axis in range(mesh.ndim):
        lists: list[Any] = [None] * mesh.size(axis)
        dist.all_gather_object(lists, numbers, group=mesh.get_group(axis))
        numbers = list(itertools.chain.from_iterable(lists))
    return numbers


class _ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the tensor."""
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, None]:
        """Return the gradient times the factor."""
        return gradients[0] * ctx.factor, None


def scale_gradient(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Return the tensor, whose gradient will be multiplied by a number."""
    result: torch.Tensor = _ScaledGradient.apply(tensor, factor)  # type: ignore[no-untyped-call]
    return result


def whole_batch(value: Any, ranks: int) -> Any:
    """Return a meta tensor of the shape that the batch of all ranks has."""
    if not isinstance(value, torch.Tensor):
        return value
    shape = list(value.shape)
    if shape and not isinstance(value, torch.nn.Parameter):
        shape[0] *= ranks
    return torch.empty(shape, dtype=value.dtype, device="meta")


def batch_placements(tensor: torch.Tensor, mesh: Any) -> list[Any]:
    """Return the placements of a batch of which each rank has its share."""
    return [Shard(0)] * mesh.ndim if tensor.ndim else whole_placements(mesh)
