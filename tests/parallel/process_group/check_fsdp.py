"""FSDP1, FSDP2 and hybrid sharding, against training by one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.parallel.process_group import models
from tests.parallel.process_group.check_ddp import own_batches
from tests.parallel.process_group.features import Skipped, feature


def fully_shard(module: nn.Module, **options: Any) -> None:
    """FSDP2's function, which is there and works without a GPU from torch 2.6 on."""
    try:
        from torch.distributed.fsdp import fully_shard as shard
    except ImportError:
        raise Skipped("FSDP2 needs CUDA in this release of torch") from None
    shard(module, **options)


def sharded(mesh: DeviceMesh | None = None) -> nn.Sequential:
    model = models.make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def cpu_mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def own_values(model: nn.Module) -> int:
    return sum(parameter.to_local().numel() for parameter in model.parameters())


@feature()
def fsdp2() -> None:
    size = dist.get_world_size()
    runs = []
    for _ in range(2):
        model = sharded(cpu_mesh(size))
        models.train(model, models.adam(model), own_batches())
        models.close(model, models.trained_alone())
        runs.append([parameter.to_local().clone() for parameter in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))  # Twice the same bits.
    whole = sum(parameter.numel() for parameter in models.make_model().parameters())
    assert own_values(model) == whole // size


@feature(4)
def fsdp2_hybrid() -> None:
    model = sharded(cpu_mesh(2, 2))
    models.train(model, models.adam(model), own_batches())
    models.close(model, models.trained_alone())
    whole = sum(parameter.numel() for parameter in models.make_model().parameters())
    assert own_values(model) == whole // 2


@feature(2)
def fsdp2_reshard_and_accumulate() -> None:
    model = sharded(cpu_mesh(2))
    alone = models.make_model()
    for step in range(2):
        model.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
        (models.loss_of(model, own_batches()[step]) / 2).backward()
        (models.loss_of(alone, models.make_batch(step)) / 2).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, atol=1e-6, rtol=0)
    model.reshard()  # type: ignore[operator]


@feature(2)
def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = FullyShardedDataParallel(
        models.make_model(), device_id=torch.device("cpu"), use_orig_params=True
    )
    models.train(model, models.adam(model), own_batches())
    with FullyShardedDataParallel.summon_full_params(model):
        models.close(model, models.trained_alone())
