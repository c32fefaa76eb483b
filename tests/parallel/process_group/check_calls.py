"""Every collective of c10d on tensors of every kind, against values computed by one rank."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from tests.parallel.process_group.features import feature

single = "single" if hasattr(dist, "all_gather_single") else "into_tensor"
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def rank_and_size() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def value(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The tensor of one rank: small whole numbers, which every sum has exactly."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(1, 4, shape, generator=generator).to(dtype)


def stacked(size: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([value(rank, *shape, dtype=dtype) for rank in range(size)])


def same(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert torch.equal(found, expected), (found, expected)


@feature()
def all_gathers() -> None:
    rank, size = rank_and_size()
    every = stacked(size, 2, 3)
    output = torch.empty(2 * size, 3)
    all_gather_single(output, value(rank, 2, 3))
    same(output, every.flatten(0, 1))
    output = torch.zeros(2 * size, 3)  # The input is its own part of the output.
    output[2 * rank : 2 * rank + 2] = value(rank, 2, 3)
    all_gather_single(output, output[2 * rank : 2 * rank + 2])
    same(output, every.flatten(0, 1))
    shifted = torch.zeros(2 * size, 3)  # The input is another part of the output.
    other = (rank + 1) % size
    shifted[2 * other : 2 * other + 2] = value(rank, 2, 3)
    all_gather_single(shifted, shifted[2 * other : 2 * other + 2])
    same(shifted, every.flatten(0, 1))
    parts = [torch.empty(3, 2).t() for _ in range(size)]  # Not contiguous.
    dist.all_gather(parts, value(rank, 2, 3))
    same(torch.stack(parts), every)
    uneven = [torch.empty(index + 1) for index in range(size)]
    dist.all_gather(uneven, torch.full((rank + 1,), float(rank)))
    assert [part.tolist() for part in uneven] == [[float(i)] * (i + 1) for i in range(size)]


@feature()
def broadcasts_gathers_and_scatters() -> None:
    rank, size = rank_and_size()
    for root in range(size):
        tensor = value(rank, 2, 2)
        dist.broadcast(tensor, root)
        same(tensor, value(root, 2, 2))
        parts = [torch.empty(3, 2) for _ in range(size)] if rank == root else None
        dist.gather(value(rank, 3, 2), parts, root)
        if parts is not None:
            same(torch.stack(parts), stacked(size, 3, 2))
        given = [value(10 + index, 2) for index in range(size)] if rank == root else None
        output = torch.empty(2)
        dist.scatter(output, given, root)
        same(output, value(10 + rank, 2))


@feature()
def all_to_alls() -> None:
    rank, size = rank_and_size()
    tensor = torch.arange(2 * size).reshape(2 * size, 1) + 100 * rank
    output = torch.empty_like(tensor)
    dist.all_to_all_single(output, tensor)
    expected = [[100 * source + 2 * rank + i] for source in range(size) for i in range(2)]
    assert output.tolist() == expected
    given, taken = list(range(size)), [rank] * size
    tensor = torch.full((sum(given), 2), float(rank))
    output = torch.empty(sum(taken), 2)
    dist.all_to_all_single(output, tensor, taken, given)
    assert output[:, 0].tolist() == [float(i) for i in range(size) for _ in range(rank)]
    in_place = torch.arange(size) + 10 * rank
    dist.all_to_all_single(in_place, in_place)
    assert in_place.tolist() == [10 * source + rank for source in range(size)]
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((i + 1,), float(rank)) for i in range(size)])
    assert [part.tolist() for part in outputs] == [[float(i)] * (rank + 1) for i in range(size)]


@feature()
def messages() -> None:
    rank, size = rank_and_size()
    following, before = (rank + 1) % size, (rank - 1) % size
    received = torch.empty(5)
    request = dist.isend(value(rank, 5), following)
    dist.recv(received, before)
    request.wait()
    same(received, value(before, 5))
    ops = [
        dist.P2POp(dist.isend, value(rank + 20, 4), following),
        dist.P2POp(dist.irecv, into := torch.empty(4), before),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same(into, value(before + 20, 4))
    if rank < 2:  # Messages of two tags cross.
        one, two = torch.empty(2), torch.empty(2)
        if rank == 0:
            works = [dist.isend(value(1, 2), 1, tag=1), dist.isend(value(2, 2), 1, tag=2)]
        else:
            works = [dist.irecv(two, 0, tag=2), dist.irecv(one, 0, tag=1)]
        for work in works:
            assert work is not None
            work.wait()
        if rank == 1:
            same(one, value(1, 2))
            same(two, value(2, 2))
    dist.barrier()


@feature()
def objects() -> None:
    rank, size = rank_and_size()
    every: list[Any] = [None] * size
    dist.all_gather_object(every, {"rank": rank, "text": "x" * rank})
    assert every == [{"rank": i, "text": "x" * i} for i in range(size)]
    values = [{"root": True}] if rank == 0 else [None]
    dist.broadcast_object_list(values, 0)
    assert values == [{"root": True}]
    gathered: list[Any] | None = [None] * size if rank == 1 else None
    dist.gather_object(rank, gathered, 1)
    assert gathered is None or gathered == list(range(size))
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [f"for {i}" for i in range(size)] if rank == 0 else None, 0)
    assert mine == [f"for {rank}"]


@feature()
def coalesced_calls() -> None:
    rank, size = rank_and_size()
    tensors = [value(rank, 3 + i) for i in range(4)]
    with _coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    for i, tensor in enumerate(tensors):
        same(tensor, stacked(size, 3 + i).sum(0))
    outputs = [torch.empty(2 * size) for _ in range(3)]
    with _coalescing_manager(async_ops=True) as manager:
        for i, output in enumerate(outputs):
            all_gather_single(output, value(rank + 10 * i, 2))
    manager.wait()
    for i, output in enumerate(outputs):
        same(output, torch.cat([value(r + 10 * i, 2) for r in range(size)]))
    group = dist.group.WORLD
    assert group is not None
    tensors = [value(rank, 3), value(rank, 4)]
    with _coalescing_manager(group, torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.broadcast(tensor, 1, async_op=True)
    manager.wait()
    same(tensors[1], value(1, 4))


@feature()
def tensors_that_autograd_needs() -> None:
    """A tensor that is only read keeps its version, and one that is written gets another."""
    rank, size = rank_and_size()
    saved = torch.ones(3, requires_grad=True).relu()
    kept, version = saved.detach(), saved._version
    if rank == 0:
        dist.send(kept, 1)
    elif rank == 1:
        dist.recv(torch.empty(3), 0)
    dist.broadcast(kept if rank == 0 else torch.empty(3), 0)
    dist.reduce(kept if rank else torch.ones(3), 0)
    all_gather_single(torch.empty(3 * size), kept)
    assert saved._version == version
    dist.all_reduce(kept)
    assert saved._version > version


@feature()
def works_and_futures() -> None:
    rank, size = rank_and_size()
    tensor = value(rank, 8)
    work = dist.all_reduce(tensor, async_op=True)
    assert work.wait(timedelta(seconds=30))
    assert work.is_completed() and work.is_success() and work.exception() is None
    assert work.result()[0] is tensor
    chained = dist.all_reduce(value(rank, 8), async_op=True).get_future()

    def reduce_again(future: Any) -> torch.Tensor:
        inner = future.value()[0]
        dist.all_reduce(inner)  # Waits for another collective inside of a callback.
        return inner

    same(chained.then(reduce_again).wait(), stacked(size, 8).sum(0) * size)


@feature(2)
def functional_collectives_in_one_graph() -> None:
    from torch.distributed import _functional_collectives as functional

    rank, size = rank_and_size()
    group = dist.group.WORLD
    assert group is not None

    def body(tensor: torch.Tensor) -> torch.Tensor:
        reduced = functional.all_reduce(tensor * 2, "sum", group)
        gathered = functional.all_gather_tensor(reduced, 0, group)
        return functional.reduce_scatter_tensor(gathered, "sum", 0, group) + 1

    expected = stacked(size, 4).sum(0) * 2 * size + 1
    same(body(value(rank, 4)), expected)
    same(torch.compile(body, backend="aot_eager", fullgraph=True)(value(rank, 4)), expected)
