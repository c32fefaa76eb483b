"""What is wrong is said: at the call, or by both ranks; and the job goes on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import hvdlite.torch as hvd
from tests.parallel.process_group.check_calls import all_gather_single, reduce_scatter_single
from tests.parallel.process_group.features import feature


def refused(call: Callable[[], object], *words: str) -> None:
    """`call` raises ValueError at once, with these words."""
    with pytest.raises(ValueError) as error:
        call()
    for word in words:
        assert word in str(error.value), error.value


def job_goes_on() -> None:
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(dist.get_world_size())] * 2


@feature()
def wrong_at_the_call() -> None:
    size = dist.get_world_size()
    out, row = torch.empty(size * 3), torch.ones(4)
    refused(lambda: all_gather_single(out, row), f"{size * 3} elements", f"{4 * size}")
    refused(lambda: reduce_scatter_single(torch.empty(2), torch.ones(size * 2 + 1)), "input has")
    refused(lambda: all_gather_single(torch.empty(4, size).t(), row), "contiguous")
    refused(lambda: all_gather_single(torch.empty(4 * size).int(), row), "int32", "float32")
    refused(
        lambda: dist.all_to_all_single(torch.empty(3), torch.ones(size), [1] * size, [1] * size),
        "output splits", "(3,)",
    )  # fmt: skip
    scalar = torch.ones(())
    refused(lambda: dist.all_to_all_single(torch.empty(size), scalar), "input has no dimensions")
    refused(lambda: dist.all_to_all_single(scalar, torch.ones(size)), "output has no dimensions")
    refused(lambda: dist.all_reduce(torch.ones(2, device="meta")), "meta")
    refused(lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()), "sparse_csr")
    if hasattr(torch, "float8_e4m3fn"):
        refused(lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "float8")
    refused(lambda: dist.all_gather([torch.empty(2)] * size, torch.ones(3)), "number")
    job_goes_on()


@feature()
def wrong_on_one_rank() -> None:
    """A call that is refused on one rank is none: the others have not made it."""
    if dist.get_rank() == 1:
        refused(lambda: dist.all_reduce(torch.ones(2).to(torch.float8_e4m3fn)), "float8")
        refused(lambda: dist.all_reduce(torch.ones(2, dtype=torch.bool), dist.ReduceOp.AVG), "bool")
        refused(lambda: dist.broadcast(torch.ones(2).to_sparse(), 0), "sparse")
        refused(lambda: dist.send(torch.ones(2).to_sparse(), 0), "sparse")
    job_goes_on()
    tensor = torch.ones(2)
    dist.broadcast(tensor, 0)
    if dist.get_rank() == 1:
        dist.send(tensor, 0)
    elif dist.get_rank() == 0:
        dist.recv(tensor, 1)
    job_goes_on()


@feature()
def ranks_disagree() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    tensor = torch.ones(3 if rank == 0 else 4)
    with pytest.raises(hvd.HorovodInternalError) as error:
        dist.all_reduce(tensor)
    text = str(error.value)
    assert "ranks disagree on shape: rank 0 has (3,), rank 1 has (4,)" in text, text
    assert "allreduce 'pg.0" in text and ".allreduce." in text, text
    with pytest.raises(hvd.HorovodInternalError, match="data type"):
        dist.broadcast(torch.ones(2).to([torch.float32, torch.float64][min(rank, 1)]), 0)
    with pytest.raises(hvd.HorovodInternalError, match="root rank"):
        dist.broadcast(torch.ones(2), min(rank, 1))
    job_goes_on()
    # Rank 1 sends more than the others have room for: they say what came.
    parts = [torch.empty(2) for _ in range(size)]
    own = torch.ones(2)
    if rank == 1:
        own = torch.ones(5)
        parts[1] = torch.empty(5)
        dist.all_gather(parts, own)
    else:
        with pytest.raises(hvd.HorovodInternalError, match=r"\[2, 2.*\[2, 5"):
            dist.all_gather(parts, own)
    job_goes_on()


@feature()
def made_again_after_an_error_inside_of_a_coalescing() -> None:
    """torch goes on collecting the calls of the group, whatever its backend."""
    with contextlib.suppress(KeyError), _coalescing_manager():
        dist.all_reduce(torch.ones(2))
        raise KeyError
    dist.destroy_process_group()
    hvd.init_process_group()
    job_goes_on()


@feature()
def errors_of_futures() -> None:
    """The C++ half of a future has the error too: DDP reads it in backward."""
    rank = dist.get_rank()
    work = dist.all_reduce(torch.ones(3 + min(rank, 1)), async_op=True)
    with pytest.raises(RuntimeError, match="disagree on shape"):
        work.get_future().wait()
    with pytest.raises(hvd.HorovodInternalError):
        work.wait()
    assert work.is_completed() and not work.is_success()
    assert "disagree on shape" in str(work.exception())
    job_goes_on()


@feature(2)
def a_rank_is_late() -> None:
    rank = dist.get_rank()
    hvd.barrier()
    if rank == 0:
        tensor = torch.ones(2)
        work = dist.all_reduce(tensor, async_op=True)
        with pytest.raises(hvd.HorovodInternalError, match=r"not complete after 0.2 s.*\[0, 1\]"):
            work.wait(timedelta(seconds=0.2))
        hvd.barrier()  # Only now does the other rank come.
        work.wait()
    else:
        hvd.barrier()
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
    assert tensor.tolist() == [2.0, 2.0]
    group = dist.new_group([0, 1])
    group.set_timeout(timedelta(seconds=0.2))  # Now that both have formed it.
    if rank == 0:
        with pytest.raises(hvd.HorovodInternalError, match="not complete"):
            dist.barrier(group=group)
        hvd.barrier()
    else:
        hvd.barrier()
        dist.barrier(group=group)
    dist.destroy_process_group(group)


@feature(2)
def a_rank_that_does_not_come_to_ddp() -> None:
    """DDP waits for futures alone."""
    group = dist.new_group([0, 1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1), process_group=group)
    group.set_timeout(timedelta(seconds=0.2))
    loss = model(torch.ones(1, 2)).sum()
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match=r"was not complete after 0\.2 s"):
            loss.backward()
    hvd.barrier()
    if dist.get_rank() == 1:
        loss.backward()
    hvd.barrier()
    dist.destroy_process_group(group)


@feature(2)
def other_backends_beside_this_one() -> None:
    """torch would give all devices to this one, and not say so."""
    dist.destroy_process_group()
    try:
        dist.init_process_group("cpu:hvdlite,cuda:gloo", init_method="hvdlite://")
        refused(lambda: dist.all_reduce(torch.ones(1)), "gloo", "all devices")
    finally:
        dist.destroy_process_group()
    hvd.init_process_group()
    refused(lambda: group_of([1, 0]), "ascend")


def group_of(ranks: list[int]) -> Any:
    from hvdlite.torch.process_group.registration import _create

    class Options:
        global_ranks_in_group = ranks
        group_size = len(ranks)
        group_rank = ranks.index(dist.get_rank())

    return _create(Options())
