"""What of c10d only gloo had: recv from any rank, monitored_barrier, sparse tensors."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from tests.parallel.process_group.check_calls import rank_and_size, same
from tests.parallel.process_group.features import feature

SECOND = timedelta(seconds=1)
MOMENT = timedelta(milliseconds=100)
LONG = timedelta(seconds=2)  # In which ranks come that are to come, however busy the machine is.


def subgroup() -> tuple[Any, list[int]]:
    """A group of all ranks but rank 0, and these ranks."""
    members = list(range(1, dist.get_world_size()))
    return dist.new_group(members), members


@feature()
def recv_from_any_rank() -> None:
    """The sender is returned; the messages of each rank come in their order."""
    rank, size = rank_and_size()
    for tag in (0, 7):
        if rank:
            for number in range(3):
                dist.send(torch.tensor([rank, number]), 0, tag=tag)
            continue
        came: dict[int, list[int]] = {}
        for _ in range(3 * (size - 1)):
            tensor = torch.empty(2, dtype=torch.int64)
            sender = dist.recv(tensor, tag=tag)
            assert sender == tensor[0]
            came.setdefault(sender, []).append(int(tensor[1]))
        assert came == {sender: [0, 1, 2] for sender in range(1, size)}


@feature()
def recv_from_any_rank_in_order_of_calls() -> None:
    """One that was called later, also from one rank, gets the later message."""
    rank, size = rank_and_size()
    last = size - 1
    if rank == 0:
        tensors = [torch.empty(1) for _ in range(4)]
        works = [dist.irecv(tensors[0]), dist.irecv(tensors[1], last), dist.irecv(tensors[2])]
        works += [dist.irecv(tensors[3], last)]
        dist.barrier()  # Nothing is sent before.
        for work in works:
            assert work.wait()
        assert [each.item() for each in tensors] == [0.0, 1.0, 2.0, 3.0]
        assert [work._source_rank() for work in works] == [last] * 4
        assert works[0].is_success() and works[0].result()[0] is tensors[0]
        assert works[2].get_future().wait()[0] is tensors[2]
    else:
        dist.barrier()
        if rank == last:
            for number in range(4):
                dist.send(torch.full((1,), float(number)), 0)


@feature(4)
def recv_from_any_rank_of_a_group() -> None:
    """Ranks are global; messages of other groups and tags are not taken; all at the same time."""
    group, members = subgroup()
    rank = dist.get_rank()
    if rank == 0:
        dist.send(torch.tensor([-1.0]), 1)
        return
    others = [other for other in members if other != rank]
    sent = [dist.isend(torch.tensor([float(rank)]), other, group) for other in others]
    came = []
    for _ in others:
        tensor = torch.empty(1)
        came.append(dist.recv(tensor, group=group))
        assert tensor.item() == came[-1]
    assert sorted(came) == others
    for work in sent:
        assert work is not None
        work.wait()
    if rank == 1:
        tensor = torch.empty(1)
        assert dist.recv(tensor) == 0 and tensor.item() == -1


@feature()
def recv_from_any_rank_that_does_not_come() -> None:
    rank, _ = rank_and_size()
    if rank == 0:
        work = dist.irecv(torch.empty(1))
        assert work is not None and not work.is_completed()
        with pytest.raises(hvd.HorovodInternalError, match=r"recv from any rank.*0\.1 s"):
            work.wait(MOMENT)
    dist.barrier()
    if rank == 1:
        dist.send(torch.ones(1), 0)  # The late one is taken, and the next one is the next one's.
        dist.send(torch.full((1,), 2.0), 0)
    elif rank == 0:
        tensor = torch.empty(1)
        assert dist.recv(tensor) == 1
        same(tensor, torch.full((1,), 2.0))


@feature()
def monitored_barriers_pass() -> None:
    for _ in range(3):
        dist.monitored_barrier()
        dist.monitored_barrier(timeout=SECOND * 20, wait_all_ranks=True)
    group, _ = subgroup()
    if dist.get_rank():
        dist.monitored_barrier(group, SECOND * 20)
    with pytest.raises(TypeError, match=r"datetime.timedelta, got 1"):
        dist.monitored_barrier(timeout=1)


@feature(4)
def monitored_barrier_without_some_ranks() -> None:
    """The texts are gloo's; those who come late are told, and the next barrier passes."""
    rank, _ = rank_and_size()
    for wait_all, names in ((False, "Rank 2 failed"), (True, "Ranks 2, 3 failed")):
        if rank == 0:
            with pytest.raises(RuntimeError) as error:
                dist.monitored_barrier(timeout=LONG, wait_all_ranks=wait_all)
            assert f"[Rank 0]: {names} to pass monitoredBarrier in 2000 ms" in str(error.value)
        elif rank == 1:
            with pytest.raises(RuntimeError, match=r"Rank 1 successfully reached.*\n.*2, 3"):
                dist.monitored_barrier(timeout=20 * SECOND)
        dist.barrier()
        if rank > 1:
            with pytest.raises(RuntimeError, match="successfully reached monitoredBarrier, but"):
                dist.monitored_barrier(timeout=20 * SECOND)
        dist.monitored_barrier(timeout=20 * SECOND)
    group, _ = subgroup()  # Ranks 1 to 3; gloo counts them from 0.
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"Rank 2 failed to pass(.|\n)*rank 3 of the job"):
            dist.monitored_barrier(group, timeout=LONG.total_seconds())
    elif rank == 2:
        with pytest.raises(RuntimeError, match="Rank 1 successfully reached"):
            dist.monitored_barrier(group, 20 * SECOND)


def sparse(rank: int, *, coalesced: bool = False) -> torch.Tensor:
    """A sparse tensor with `rank` entries, twice each."""
    generator = torch.Generator().manual_seed(rank)
    rows = torch.randint(0, 6, (1, rank), generator=generator).repeat(1, 2)
    values = torch.randint(1, 5, (2 * rank, 3), generator=generator).float()
    tensor = torch.sparse_coo_tensor(rows, values, (6, 3), check_invariants=True)
    return tensor.coalesce() if coalesced else tensor


@feature()
def sparse_all_reduces() -> None:
    rank, size = rank_and_size()
    total = sum(sparse(each).to_dense() for each in range(size))
    assert isinstance(total, torch.Tensor)
    for coalesced in (False, True):
        tensor = sparse(rank, coalesced=coalesced)
        dist.all_reduce(tensor)
        assert tensor.is_coalesced(), "as after gloo's"
        same(tensor.to_dense(), total)
    work = dist.all_reduce(tensor := sparse(rank), async_op=True)
    assert work is not None
    (result,) = work.get_future().wait()
    same(result.to_dense(), total)
    same(tensor.to_dense(), total)
    group, members = subgroup()
    if rank:
        tensor = sparse(rank).to(torch.int64)
        dist.all_reduce(tensor, group=group)
        part = sum(sparse(each).to_dense() for each in members)
        assert isinstance(part, torch.Tensor)
        same(tensor.to_dense(), part.to(torch.int64))


@feature()
def sparse_all_reduces_that_are_refused() -> None:
    rank, _ = rank_and_size()
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.MAX):
        with pytest.raises(NotImplementedError, match=r"only works with ReduceOp\.SUM"):
            dist.all_reduce(sparse(rank), op)
    with pytest.raises(hvd.HorovodInternalError, match=r"sparse tensor \[6, 3\].*\[7, 3\]"):
        row = torch.zeros(1, 1, dtype=torch.int64)
        other = torch.sparse_coo_tensor(row, torch.ones(1, 3), (7, 3), check_invariants=True)
        dist.all_reduce(sparse(rank) if rank == 0 else other)
    with pytest.raises(hvd.HorovodInternalError, match="ranks disagree on the operation"):
        dist.all_reduce(sparse(rank) if rank == 0 else torch.ones(6, 3))
    tensor = sparse(rank)
    dist.all_reduce(tensor)


class WordModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 4, sparse=True)
        self.last = nn.Linear(4, 1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(self.words(words)).sum()
        return result


@feature(2)
def ddp_of_a_sparse_embedding() -> None:
    """Weights after three steps, each rank with words of its own, as of one process."""
    rank, size = rank_and_size()
    torch.manual_seed(3)
    model, alone = WordModel(), WordModel()
    alone.load_state_dict(model.state_dict())
    # Ranks have different numbers of words, and so of rows in their gradients.
    words = [torch.arange(each + 2).repeat(2) * 3 % 20 for each in range(size)]
    ddp = DistributedDataParallel(model)
    ours, theirs = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, alone))
    for _ in range(3):
        ours.zero_grad()
        ddp(words[rank]).backward()
        assert model.words.weight.grad is not None and model.words.weight.grad.is_sparse
        ours.step()
        theirs.zero_grad()
        for each in words:
            (alone(each) / size).backward()
        theirs.step()
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected)
