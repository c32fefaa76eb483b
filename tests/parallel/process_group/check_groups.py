"""Groups of some ranks, several at once, made and destroyed; beside the calls of hvdlite."""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
import threading
import tracemalloc

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from tests.parallel.process_group.features import feature


@feature()
def beside_the_calls_of_hvdlite() -> None:
    size = dist.get_world_size()
    works, handles = [], []
    tensors = [torch.full((5,), float(i)) for i in range(20)]
    for i, tensor in enumerate(tensors):
        works.append(dist.all_reduce(tensor, async_op=True))
        handles.append(hvd.allreduce_async(torch.full((5,), float(i)), op=hvd.Sum, name=f"a{i}"))
    for i, (work, handle) in enumerate(zip(works, handles, strict=True)):
        work.wait()
        assert torch.equal(tensors[i], torch.full((5,), float(i * size)))
        assert torch.equal(hvd.synchronize(handle), torch.full((5,), float(i * size)))


@feature()
def groups_of_some_ranks() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    half = [list(range(size // 2)), list(range(size // 2, size))]
    groups = [dist.new_group(ranks) for ranks in half]
    mine = 0 if rank < size // 2 else 1
    tensor = torch.full((3,), float(rank))
    dist.all_reduce(tensor, group=groups[mine])
    assert tensor.tolist() == [float(sum(half[mine]))] * 3
    dist.broadcast(tensor, half[mine][-1], group=groups[mine])
    same = [dist.new_group(list(range(size))) for _ in range(2)]  # Two groups of the same ranks.
    first, second = torch.full((2,), 1.0), torch.full((2,), 10.0)
    order = same if rank % 2 else same[::-1]  # Ranks use them in another order.
    works = [
        dist.all_reduce(first if group is same[0] else second, group=group, async_op=True)
        for group in order
    ]
    for work in works:
        work.wait()
    assert first.tolist() == [float(size)] * 2 and second.tolist() == [10.0 * size] * 2
    for group in (groups[mine], *same):
        dist.destroy_process_group(group)


@feature()
def groups_in_threads() -> None:
    """Three threads with a group each, 50 calls in every one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = [dist.new_group(list(range(size))) for _ in range(3)]
    errors: list[BaseException] = []

    def call(number: int) -> None:
        try:
            for step in range(50):
                tensor = torch.full((4,), float(rank + step + number))
                dist.all_reduce(tensor, group=groups[number])
                expected = sum(range(size)) + size * (step + number)
                assert tensor.tolist() == [float(expected)] * 4, tensor
        except BaseException as error:
            errors.append(error)

    order = (0, 1, 2) if rank % 2 else (2, 1, 0)
    threads = [threading.Thread(target=call, args=(number,)) for number in order]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not errors and not any(thread.is_alive() for thread in threads), errors
    for group in groups:
        dist.destroy_process_group(group)


@feature()
def hundred_groups() -> None:
    table = current().engine.process_sets
    before = dict(table.all())
    make_and_destroy(100)
    for step in range(100):  # A group is released without waiting.
        gone = dict(table.all()).keys() <= before.keys()  # Those of other features may go as well.
        if all(hvd.allgather_object(gone, f"gone.{step}")):
            break
    assert gone, (before, table.all())


@feature(2)
def hundred_groups_more_take_no_memory() -> None:
    make_and_destroy(20)
    threads = threading.active_count()
    gc.collect()
    tracemalloc.start()
    try:
        make_and_destroy(100)
        gc.collect()
        kept = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = kept.filter_traces([tracemalloc.Filter(True, "*/hvdlite/*")]).statistics("lineno")
    # How often a name was given is kept, and up to 1 KB by the response cache, for as many names as
    # it has room for, where calls are negotiated; one group holds some 3 KB while it lives.
    assert sum(line.size for line in ours) < 100 * 2000, ours[:5]
    assert threading.active_count() <= threads


def make_and_destroy(number: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for index in range(number):
        members = sorted({index % size, (index + 1) % size})
        group = dist.new_group(members)
        if rank in members:
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(len(members))] * 2
            dist.destroy_process_group(group)
        del group  # torch 2.4 says nothing to a group that it destroys.
    hvd.barrier()


@feature()
def groups_that_their_members_make_alone() -> None:
    """Members may have made different numbers of groups, which torch hashes into their names."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.new_group([0])
    totals = []
    for _ in range(2):
        if rank in (0, size - 1):
            group = dist.new_group([0, size - 1], use_local_synchronization=True)
            tensor = torch.tensor([float(rank + 1)])
            dist.all_reduce(tensor, group=group)
            totals.append(tensor.item())
    assert totals == [size + 1] * len(totals)


@feature()
def destroyed_and_made_again() -> None:
    for _ in range(3):
        dist.destroy_process_group()
        assert not dist.is_initialized()
        hvd.init_process_group()
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [float(dist.get_world_size())] * 3


@feature()
def made_again_with_other_members() -> None:
    """torch gives the name again, of which only some ranks have had a group."""
    size = dist.get_world_size()
    for members in (list(range(1, size)), list(range(size))):
        group = dist.new_group(members)
        if dist.get_rank() in members:
            tensor = torch.ones(3)
            dist.all_reduce(tensor, group=group)
            assert tensor.tolist() == [float(len(members))] * 3
        dist.destroy_process_group()
        hvd.init_process_group()


@feature(2)
def destroyed_with_a_call_that_nobody_else_has_made() -> None:
    if dist.get_rank() == 0:
        dist.all_reduce(torch.full((3,), 100.0), async_op=True)
    dist.destroy_process_group()
    hvd.init_process_group()
    for _ in range(3):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3


@feature()
def after_a_join() -> None:
    """A joined rank takes part without making calls, and all count them anew afterwards."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for _ in range(3):
            tensor = torch.ones(2)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [1.0] * 2  # The others give nothing.
    assert hvd.join() == 0
    tensor = torch.ones(2)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(size)] * 2


@feature()
def a_group_of_an_earlier_world() -> None:
    hvd.shutdown()
    hvd.init()
    with pytest.raises(ValueError, match=r"destroy_process_group\(\), then hvd.init_process"):
        dist.all_reduce(torch.ones(2))
    dist.destroy_process_group()
    hvd.init_process_group()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [float(hvd.size())] * 3


@feature(2)
def names_in_the_timeline() -> None:
    where = hvd.broadcast_object(tempfile.mkdtemp(), 0)
    path = os.path.join(where, "timeline.json")
    hvd.start_timeline(path)
    dist.all_reduce(torch.ones(2))
    hvd.stop_timeline()
    if dist.get_rank() == 0:
        with open(path) as file:
            assert "pg.0" in (text := file.read()) and ".allreduce." in text, text
        shutil.rmtree(where)


@feature(2)
def what_torch_asks_of_a_group() -> None:
    group = dist.group.WORLD
    assert group is not None
    assert dist.get_backend() == "hvdlite" and group.name() == "hvdlite"
    assert (group.rank(), group.size()) == (hvd.rank(), hvd.size())
    assert dist.get_process_group_ranks(group) == list(range(hvd.size()))
    group.get_group_store().set("key", "value")
    assert group.get_group_store().get("key") == b"value"
    assert not group.supports_splitting
    assert torch.device("cpu") in group._device_types  # async_save asks
    with pytest.raises(RuntimeError, match="No backend type"):
        group._get_backend(torch.device("cpu"))  # It is a group, and has none in C++.


@feature(2)
def torchs_checks_wrap_nothing() -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL puts a wrapper around gloo; errors here need none."""
    before, kind = dist.get_debug_level(), type(dist.group.WORLD)
    dist.destroy_process_group()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        hvd.init_process_group()
        assert type(dist.group.WORLD) is type(dist.new_group([0, 1])) is kind
        with pytest.raises(hvd.HorovodInternalError, match="disagree on shape"):
            dist.all_reduce(torch.ones(2 + dist.get_rank()))
    finally:
        dist.set_debug_level(before)
        dist.destroy_process_group()
        hvd.init_process_group()
