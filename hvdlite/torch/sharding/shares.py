"""A rank's share of the batch: what goes into a sharded part, and comes out of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvdlite.common.layouts.layout import Layout, whole
from hvdlite.common.runtime.basics import size
from hvdlite.torch import mpi_ops


def check_shares(
    tensors: Sequence[torch.Tensor], mesh: Any, is_planned: bool, digest: int, seed: int
) -> int:
    """Return the seed of the first rank.

    Raises `ValueError` on all ranks if their shares differ, or if some have a plan for such a call
    and others have not, as they would wait for each other, or if the digests of the rest differ.
    """
    # The numbers tell where they end, so that no two lists of shapes have the same in a row.
    own = [len(tensors), *(n for each in tensors for n in (each.ndim, *each.shape))]
    of_ranks = gathered([*own, is_planned, digest, seed], mesh)
    length = len(own) + 3
    ranks = size() if mesh is None else mesh.size()
    rows = [of_ranks[start : start + len(own)] for start in range(0, len(of_ranks), length)]
    if rows != [own] * ranks:
        raise ValueError(
            f"ranks call a sharded part with tensors of other shapes, by rank of the mesh: "
            f"{'; '.join(_shapes(of_ranks))}: each rank gives a share of the batch of equal size"
        )
    planned, digests = (of_ranks[length - back :: length] for back in (3, 2))
    if len(set(planned)) > 1:
        raise ValueError(
            f"rank {planned.index(1)} of the mesh has called a sharded part with such arguments "
            f"before, and rank {planned.index(0)} has not: arguments that are no tensors, and "
            "train() or eval(), are the same on all ranks"
        )
    if len(set(digests)) > 1:
        other = next(rank for rank, each in enumerate(digests) if each != digests[0])
        raise ValueError(
            f"ranks 0 and {other} of the mesh call a sharded part with tensors of other kinds or "
            "dtypes, with other numbers or texts, or under another train(), eval() or autocast: "
            "these are the same on all ranks"
        )
    return of_ranks[length - 1]


def _shapes(numbers: Sequence[int]) -> Iterator[str]:
    """Yield the shapes that the numbers of each rank say."""
    left = iter(numbers)
    for count in left:
        shapes = [tuple(itertools.islice(left, next(left))) for _ in range(count)]
        next(left), next(left), next(left)  # whether there is a plan, the digest and the seed
        yield ", ".join(map(str, shapes)) or "no tensor"


def gathered(numbers: list[int], mesh: Any) -> list[int]:
    """Return the numbers of all ranks of a mesh in a row; None: of the job."""
    if mesh is None or mesh.size() == size():
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
        """Return the gradient times the factor.

        It counts once, while the gradient of this gradient would be multiplied as well.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a sharded part has no second derivatives: take its gradient without "
                "create_graph=True, or call what is differentiated twice outside of the part"
            )
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


def share_layout(shape: Sequence[int], ranks: int) -> Layout:
    """Return the layout of a batch of which each rank has its share."""
    if not shape:
        return whole(0, ranks)
    return Layout((ranks,), (0, *[-1] * (len(shape) - 1)), uneven=shape[0] % ranks > 0)
