"""FSDP1, FSDP2 and hybrid sharding, against training by one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from tests.parallel.process_group import models
from tests.parallel.process_group.check_ddp import own_batches, weights_compared_every_two_steps
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


@feature(4)
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


def stepped_from(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    models.train(model, optimizer, [own_batches()[0] for _ in range(count)])


@feature(4)
def fsdp2_replicas_are_compared() -> None:
    """Ranks 1 and 3 have the same half of each parameter: along the axis "replicate"."""
    with weights_compared_every_two_steps():
        model = sharded(cpu_mesh(2, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
        stepped_from(model, optimizer, 4)
        if dist.get_rank() == 3:
            optimizer.state[model[2].bias]["momentum_buffer"].to_local()[3] += 1
        if dist.get_rank() % 2 == 0:
            optimizer.step()
            optimizer.step()
            return
        with pytest.raises(RuntimeError) as error:
            optimizer.step()
            optimizer.step()
    text = str(error.value)
    assert text.startswith("weights have diverged at step 6: ranks 1 and 3 differ"), text
    assert "first in '2.bias: momentum_buffer': element [3] is" in text, text


@feature(2)
def fsdp2_parts_are_not_compared() -> None:
    """Each rank has a part of its own, which is said once."""
    with weights_compared_every_two_steps(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = sharded(cpu_mesh(2))
        stepped_from(model, models.adam(model), 4)
        ddp, alone = DistributedDataParallel(models.make_model()), sharded(cpu_mesh(2, 1)["shard"])
        stepped_from(ddp, torch.optim.SGD([*ddp.parameters(), *model.parameters()], lr=0.1), 4)
        stepped_from(alone, models.adam(alone), 4)
    told = [str(each.message) for each in caught if "CHECK_WEIGHTS" in str(each.message)]
    assert len(told) == 1 and "compares nothing of Adam: its parameters are divided" in told[0]


@feature(4)
def fsdp2_of_two_modules_is_compared() -> None:
    """Whose parameters have equal names, except on a rank that has a module around one of them."""
    with weights_compared_every_two_steps():
        mesh = cpu_mesh(2, 2)
        encoder, decoder = sharded(mesh), sharded(mesh)
        around = nn.ModuleDict({"body": encoder}) if dist.get_rank() == 3 else None
        parameters = [*encoder.parameters(), *decoder.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        optimizer.step()
        text = ""
        if dist.get_rank() == 3:
            with torch.no_grad():
                encoder[2].bias.to_local()[3] += 1
        try:
            optimizer.step()
        except RuntimeError as error:
            text = str(error)
    del around
    if dist.get_rank() % 2 == 0:
        assert text == ""
        return
    assert text.startswith("weights have diverged at step 2: ranks 1 and 3 differ"), text
    assert "in 1 of" in text and "first in '3.2.bias': element [3] is" in text, text


@feature(2)
def fsdp1_models_of_one_optimizer_are_compared() -> None:
    """In the order of the optimizer, whatever a rank has made first; not what FSDP ignores."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    rank = dist.get_rank()

    def replicated(model: nn.Module, *ignored: nn.Parameter) -> nn.Module:
        return FullyShardedDataParallel(
            model,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
            ignored_states=ignored or None,
        )

    def first() -> nn.Module:
        model = models.make_model()
        nn.init.constant_(model[4].bias, rank)
        return replicated(model, model[4].bias)

    with weights_compared_every_two_steps():
        torch.manual_seed(0)
        plain = nn.Linear(models.FEATURES, models.CLASSES)
        if rank == 0:
            one, other = first(), replicated(plain)
        else:
            other, one = replicated(plain), first()
        optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.01)
        batch = own_batches()[0]
        for step in range(5):
            if (rank, step) == (1, 4):
                with torch.no_grad():
                    other.module.bias[2] += 1
            optimizer.zero_grad()
            models.loss_of(lambda x: one(x) + other(x), batch).backward()
            if step < 4:
                optimizer.step()
        optimizer.step()
        with pytest.raises(RuntimeError, match=r"step 6: .* in 1 of .* first in 'bias': element"):
            optimizer.step()


@feature(4)
def fsdp1_hybrid_replicas_are_compared() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with weights_compared_every_two_steps():
        model = FullyShardedDataParallel(
            models.make_model(),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            device_id=torch.device("cpu"),
            device_mesh=cpu_mesh(2, 2),
            use_orig_params=True,
        )
        optimizer = models.adam(model)
        stepped_from(model, optimizer, 4)
        text = ""
        try:
            if dist.get_rank() == 3:
                with torch.no_grad():
                    next(each for each in model.parameters() if each.numel()).view(-1)[0] += 1
            optimizer.step()
            optimizer.step()
        except RuntimeError as error:
            text = str(error)
    expected = "weights have diverged at step 6: ranks 1 and 3 differ" * (dist.get_rank() % 2)
    assert text.startswith(expected) and bool(text) == bool(expected), text


@feature(2)
def fsdp1_replicas_are_compared() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    with weights_compared_every_two_steps():
        model = FullyShardedDataParallel(
            models.make_model(),
            sharding_strategy=ShardingStrategy.NO_SHARD,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
        optimizer = models.adam(model)
        stepped_from(model, optimizer, 4)
        if dist.get_rank() == 1:
            with torch.no_grad():
                next(iter(model.parameters()))[2] += 1
        with pytest.raises(RuntimeError, match="diverged at step 6: ranks 0 and 1 differ"):
            stepped_from(model, optimizer, 2)


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
