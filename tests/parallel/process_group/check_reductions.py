"""Every reduction of c10d on tensors of every kind, against values computed by one rank."""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from tests.parallel.process_group.check_calls import (
    rank_and_size,
    reduce_scatter_single,
    same,
    stacked,
    value,
)
from tests.parallel.process_group.features import feature

OPS = {
    "SUM": lambda t: t.sum(0),
    "AVG": lambda t: t.mean(0),
    "MIN": lambda t: t.min(0).values,
    "MAX": lambda t: t.max(0).values,
    "PRODUCT": lambda t: t.prod(0),
}
DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32,
    torch.uint64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


@feature()
def reductions() -> None:
    rank, size = rank_and_size()
    for dtype in DTYPES:
        every = stacked(size, 3, 5, dtype=torch.float64)
        for name, reduce in OPS.items():
            tensor = value(rank, 3, 5, dtype=dtype)
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            torch.testing.assert_close(tensor, reduce(every).to(dtype))  # Averages are truncated.
    scalar = torch.tensor(float(rank))
    dist.all_reduce(scalar)
    assert scalar.item() == sum(range(size))
    strided = value(rank, 4, 6).t()
    dist.all_reduce(strided)
    same(strided, stacked(size, 4, 6).sum(0).t())
    dist.all_reduce(torch.empty(0))
    numbers = torch.complex(value(rank, 3), value(rank, 3))
    dist.all_reduce(numbers)
    same(numbers.real, stacked(size, 3).sum(0))


@feature()
def premultiplied_sum() -> None:
    rank, size = rank_and_size()
    tensor = value(rank, 6)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    same(tensor, stacked(size, 6).sum(0) * 0.5)


@feature()
def bits() -> None:
    rank, size = rank_and_size()
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.bool):
        every = [(value(r, 9) * (3 + r)).to(dtype) for r in range(size)]
        for name, combine in (
            ("BAND", torch.bitwise_and),
            ("BOR", torch.bitwise_or),
            ("BXOR", torch.bitwise_xor),
        ):
            tensor = every[rank].clone()
            dist.all_reduce(tensor, getattr(dist.ReduceOp, name))
            same(tensor, functools.reduce(combine, every))


@feature()
def reduce_to_one_rank() -> None:
    rank, size = rank_and_size()
    for root in range(size):
        tensor = value(rank, 7)
        dist.reduce(tensor, root)
        same(tensor, stacked(size, 7).sum(0) if rank == root else value(rank, 7))


@feature()
def reduce_scatters() -> None:
    rank, size = rank_and_size()
    whole = stacked(size, 2 * size, 3)
    output = torch.empty(2, 3)
    reduce_scatter_single(output, value(rank, 2 * size, 3))
    same(output, whole.sum(0)[2 * rank : 2 * rank + 2])
    reduce_scatter_single(output, value(rank, 2 * size, 3), dist.ReduceOp.AVG)
    same(output, whole.mean(0)[2 * rank : 2 * rank + 2])
    inside = value(rank, 2 * size, 3)  # The output is a part of the input.
    reduce_scatter_single(inside[2 * rank : 2 * rank + 2], inside)
    same(inside[2 * rank : 2 * rank + 2], whole.sum(0)[2 * rank : 2 * rank + 2])
    dist.reduce_scatter(output, list(value(rank, 2 * size, 3).chunk(size)), dist.ReduceOp.MAX)
    same(output, whole.max(0).values[2 * rank : 2 * rank + 2])
    rows = [index + 1 for index in range(size)]  # Parts of different sizes.
    uneven = torch.empty(rows[rank], 3)
    dist.reduce_scatter(uneven, list(value(rank, sum(rows), 3).split(rows)))
    same(uneven, stacked(size, sum(rows), 3).sum(0).split(rows)[rank])
