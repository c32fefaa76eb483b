"""torch.distributed.checkpoint, written under one layout and read under another: the same bits."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import hvdlite.torch as hvd
from tests.parallel.process_group import models
from tests.parallel.process_group.check_ddp import own_batches
from tests.parallel.process_group.check_dtensor import Replicate, Shard, distribute_tensor
from tests.parallel.process_group.check_fsdp import cpu_mesh, sharded
from tests.parallel.process_group.features import Skipped, feature


@contextmanager
def folder() -> Iterator[str]:
    """A folder that all ranks see, which goes with the context."""
    with tempfile.TemporaryDirectory() as own:
        yield hvd.broadcast_object(own, 0)
        hvd.barrier()


def tensors() -> dict[str, torch.Tensor]:
    return {
        f"{rows}x{columns}": torch.arange(rows * columns).reshape(rows, columns) / 7
        for rows, columns in ((8, 4), (5, 6), (3, 16))
    }


@feature()
def checkpoints_of_dtensors() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors().items()}
    with folder() as where:
        checkpoint.save(state, checkpoint_id=where)
        for placement in (Shard(1), Replicate()):
            empty = {
                name: distribute_tensor(torch.zeros_like(t), mesh, [placement])
                for name, t in tensors().items()
            }
            checkpoint.load(empty, checkpoint_id=where)
            for name, tensor in tensors().items():
                assert torch.equal(empty[name].full_tensor(), tensor), name


@feature(2)
def asynchronous_checkpoint() -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in tensors().items()}
    beside = dist.new_group([0, 1])  # Two threads cannot agree on the order of calls of one group.
    with folder() as where:
        future: Any = checkpoint.async_save(state, checkpoint_id=where, process_group=beside)
        for _ in range(5):
            dist.all_reduce(torch.ones(3))  # Training goes on meanwhile.
        future.result()
        dist.barrier()
        empty = {n: distribute_tensor(torch.zeros_like(t), mesh, [Shard(1)]) for n, t in
                 tensors().items()}  # fmt: skip
        checkpoint.load(empty, checkpoint_id=where)
        assert all(torch.equal(empty[n].full_tensor(), t) for n, t in tensors().items())


@feature(2)
def fsdp2_and_adam_resumed() -> None:
    """Two steps, a checkpoint and one step more have the bits of three steps."""
    mesh = cpu_mesh(dist.get_world_size())
    straight = sharded(mesh)
    models.train(straight, models.adam(straight), own_batches())
    first = sharded(mesh)
    optimizer = models.adam(first)
    models.train(first, optimizer, own_batches()[:2])
    with folder() as where:
        model_state, optimizer_state = get_state_dict(first, optimizer)
        checkpoint.save({"model": model_state, "adam": optimizer_state}, checkpoint_id=where)
        second = sharded(mesh)
        other = models.adam(second)
        model_state, optimizer_state = get_state_dict(second, other)
        state = {"model": model_state, "adam": optimizer_state}
        checkpoint.load(state, checkpoint_id=where)
        set_state_dict(
            second, other, model_state_dict=state["model"], optim_state_dict=state["adam"]
        )
    models.train(second, other, own_batches()[2:])
    for mine, theirs in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


@feature(2)
def divided_state_of_an_optimizer() -> None:
    """DCP would write the shard of one rank as that of all; it writes what is consolidated."""
    if find_spec("torch.distributed._checkpointable") is None:
        raise Skipped("DCP does not ask what it writes")
    model = models.make_model()
    optimizer = hvd.DistributedOptimizer(
        models.adam(model), model.named_parameters(), shard_state=True
    )
    models.train(model, optimizer, own_batches()[:1])
    for state in (optimizer, optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)):
        with folder() as where, pytest.raises(checkpoint.CheckpointException) as caught:
            checkpoint.save({"optimizer": state}, checkpoint_id=where)
        assert "shard_state=True" in str(caught.value) and "hvd.checkpoint" in str(caught.value)
    whole = optimizer.consolidate()
    zeros = {n: torch.zeros_like(each["exp_avg"]) for n, each in whole["state"].items()}
    read = {"state": {number: {"exp_avg": zero} for number, zero in zeros.items()}}
    with folder() as where:
        checkpoint.save({"optimizer": whole}, checkpoint_id=where)
        checkpoint.load({"optimizer": read}, checkpoint_id=where)
    fresh = models.make_model()
    oracle = models.adam(fresh)
    models.train(fresh, oracle, [models.make_batch(0)])
    for number, each in oracle.state_dict()["state"].items():
        torch.testing.assert_close(zeros[number], each["exp_avg"], atol=1e-7, rtol=0)


@feature(4)
def checkpoint_of_four_ranks_for_later() -> None:
    """Written on a (2, 2) mesh; `checkpoint_of_four_ranks` reads it on fewer ranks."""
    where = os.environ.get("CHECKPOINT")
    if where:
        checkpoint.save(by_rows_and_columns(), checkpoint_id=f"{where}/dcp")
        save_safetensors(f"{where}/safetensors")


def by_rows_and_columns() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2))
    return {name: distribute_tensor(t, mesh, [Shard(0), Shard(1)]) for name, t in tensors().items()}


def save_safetensors(where: str) -> None:
    writer = getattr(checkpoint, "HuggingFaceStorageWriter", None)
    if writer is not None:
        kept = writer(where, save_distributed=True)
        checkpoint.save(by_rows_and_columns(), storage_writer=kept)


@feature(2)
def checkpoint_of_four_ranks() -> None:
    where = os.environ.get("CHECKPOINT")
    if not where:
        return
    mesh = init_device_mesh("cpu", (2,))
    zeros = {n: distribute_tensor(torch.zeros_like(t), mesh, [Shard(1)]) for n, t in
             tensors().items()}  # fmt: skip
    checkpoint.load(zeros, checkpoint_id=f"{where}/dcp")
    assert all(torch.equal(zeros[name].full_tensor(), t) for name, t in tensors().items())
    reader = getattr(checkpoint, "HuggingFaceStorageReader", None)
    if reader is not None and os.path.isdir(f"{where}/safetensors"):
        for tensor in zeros.values():
            tensor.to_local().zero_()
        checkpoint.load(zeros, storage_reader=reader(f"{where}/safetensors"))
        assert all(torch.equal(zeros[name].full_tensor(), t) for name, t in tensors().items())
