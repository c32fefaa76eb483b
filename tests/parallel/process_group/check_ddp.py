"""DistributedDataParallel and what is built on it, against training by one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from hvdlite.torch.process_group.weights import watch_optimizers
from tests.parallel.process_group import models
from tests.parallel.process_group.features import feature


def own_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return [models.part(step, rank, size) for step in range(models.STEPS)]


def trained_by_ddp(**options: Any) -> DistributedDataParallel:
    model = models.make_model()
    if dist.get_rank() != 0:
        nn.init.zeros_(model[0].weight)  # DDP begins with the values of rank 0.
    ddp = DistributedDataParallel(model, **options)
    models.train(ddp, models.adam(ddp), own_batches())
    return ddp


@feature()
def ddp() -> None:
    models.close(trained_by_ddp(), models.trained_alone())
    models.close(trained_by_ddp(bucket_cap_mb=0.001), models.trained_alone())


@contextlib.contextmanager
def weights_compared_every_two_steps() -> Iterator[None]:
    """As HVDLITE_CHECK_WEIGHTS=2 for all optimizers that step within this context first."""
    runtime = current()
    config, runtime.config = runtime.config, replace(runtime.config, check_weights=2)
    watch_optimizers()
    try:
        yield
    finally:
        runtime.config = config


def steps_of(ddp: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    models.train(ddp, optimizer, [models.part(step, rank, size) for step in range(count)])


@feature(2)
def ddp_weights_are_compared() -> None:
    with weights_compared_every_two_steps():
        ddp = DistributedDataParallel(models.make_model(), gradient_as_bucket_view=True)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.0, momentum=0.9)
        steps_of(ddp, optimizer, 4)
        if dist.get_rank() == 1:
            optimizer.state[ddp.module[2].bias]["momentum_buffer"][3] += 1
        with pytest.raises(RuntimeError) as error:
            steps_of(ddp, optimizer, 2)
    text = str(error.value)
    assert text.startswith("weights have diverged at step 6: rank"), text
    assert "first in '2.bias: momentum_buffer': element [3] is" in text, text


@feature(2)
def ddp_weights_of_one_rank_are_not_compared() -> None:
    """Ignored parameters, divided state, uneven steps, and models of one rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    rank = dist.get_rank()
    with weights_compared_every_two_steps():
        own = nn.Linear(1, 1 + rank)
        model = nn.Sequential(models.make_model(), nn.Linear(4, 4))
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore
            model, ["1.weight"]
        )
        nn.init.constant_(model[1].weight, rank)
        ddp = DistributedDataParallel(model)
        steps_of(ddp, torch.optim.Adam([*ddp.parameters(), *own.parameters()], lr=0.01), 4)
        steps_of(ddp, ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01), 4)
        alone = torch.optim.SGD(own.parameters(), lr=0.01)
        for _ in range(3 * rank):
            own(torch.ones(1, 1)).sum().backward()
            alone.step()
        optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
        with Join([ddp]):
            steps_of(ddp, optimizer, 3 + 3 * rank)


@feature(2)
def ddp_weights_of_local_sgd_are_not_compared() -> None:
    """Each rank steps by its own gradients until the next average."""
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook

    with weights_compared_every_two_steps():
        ddp = DistributedDataParallel(models.make_model())
        alone, _ = dist.new_subgroups(group_size=1)
        state = hook.PostLocalSGDState(None, alone, start_localSGD_iter=1)
        ddp.register_comm_hook(state, hook.post_localSGD_hook)
        steps_of(ddp, torch.optim.SGD(ddp.parameters(), lr=0.1), 5)
    weights = hvd.allgather(ddp.module[0].weight.detach()[None])
    assert not torch.equal(*weights)


@feature(2)
def ddp_static_graph_and_bucket_views() -> None:
    trained = trained_by_ddp(gradient_as_bucket_view=True, static_graph=True)
    models.close(trained, models.trained_alone())


@feature()
def ddp_no_sync() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    model = models.make_model()
    ddp = DistributedDataParallel(model)
    halves = [[half.chunk(2)[i] for half in models.part(0, rank, size)] for i in range(2)]
    for index, half in enumerate(halves):
        with ddp.no_sync() if index == 0 else contextlib.nullcontext():
            (models.loss_of(ddp, half) / 2).backward()
    alone = models.make_model()
    models.loss_of(alone, models.make_batch(0)).backward()
    for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, atol=1e-6, rtol=0)


class TwoBranches(nn.Module):
    """Every step uses one branch only."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(models.FEATURES, 4), nn.Linear(models.FEATURES, 4)

    def forward(self, inputs: torch.Tensor, left: bool) -> torch.Tensor:
        result: torch.Tensor = (self.left if left else self.right)(inputs)
        return result


@feature(2)
def ddp_unused_parameters() -> None:
    torch.manual_seed(1)
    model = TwoBranches()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(2):
        ddp(models.make_batch(step)[0], left=step == 0).sum().backward()
    assert model.left.weight.grad is not None and model.right.weight.grad is not None
    torch.testing.assert_close(model.left.weight.grad[0], models.make_batch(0)[0].sum(0))


@feature()
def ddp_join_with_uneven_inputs() -> None:
    rank = dist.get_rank()
    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    steps = 0
    with Join([model]):
        for _ in range(2 + rank):
            model(torch.ones(1, 1)).sum().backward()
            steps += 1
    assert steps == 2 + rank
    gradients = [torch.zeros(1, 1) for _ in range(dist.get_world_size())]
    weight = next(model.parameters())
    dist.all_gather(gradients, weight.detach())
    assert all(torch.equal(gradient, weight) for gradient in gradients)


@feature(2)
def ddp_communication_hooks() -> None:
    alone = models.trained_alone(1)
    for hook, state, tolerance in (
        (default_hooks.fp16_compress_hook, None, 2e-2),
        (default_hooks.allreduce_hook, None, 1e-6),
        (powerSGD_hook.powerSGD_hook, power_state(), 0.2),
    ):
        ddp = DistributedDataParallel(models.make_model())
        ddp.register_comm_hook(state, hook)
        models.train(ddp, models.adam(ddp), own_batches()[:1])
        models.close(ddp, alone, tolerance)


def power_state() -> powerSGD_hook.PowerSGDState:
    return powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=4, start_powerSGD_iter=2, min_compression_rate=0.5
    )


@feature(2)
def ddp_power_sgd_converges() -> None:
    ddp = DistributedDataParallel(models.make_model())
    ddp.register_comm_hook(power_state(), powerSGD_hook.powerSGD_hook)
    batch = models.part(0, dist.get_rank(), dist.get_world_size())
    first = models.loss_of(ddp, batch).item()
    models.train(ddp, models.adam(ddp), [batch] * 20)
    assert models.loss_of(ddp, batch).item() < first / 2
    copy = next(ddp.parameters()).detach().clone()
    dist.broadcast(copy, 0)
    assert torch.equal(copy, next(ddp.parameters()))


@feature(2)
def ddp_compiled() -> None:
    model = models.make_model()
    compiled: Any = torch.compile(DistributedDataParallel(model), backend="aot_eager")
    models.train(compiled, models.adam(model), own_batches())
    models.close(model, models.trained_alone())


@feature(2)
def zero_redundancy_optimizer() -> None:
    """Bitwise equal to DistributedOptimizer, with a part of the state on each rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = DistributedDataParallel(models.make_model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.Adam, lr=0.01)
    models.train(ddp, optimizer, own_batches())
    model = models.make_model()
    ours = hvd.DistributedOptimizer(models.adam(model), model.named_parameters())
    models.train(model, ours, own_batches())
    tolerance = 0.0 if dist.get_world_size() == 2 else 1e-7
    models.close(ddp, model, tolerance)
    state = sum(
        each.numel()
        for values in optimizer.optim.state.values()
        for each in values.values()
        if each.numel() > 1
    )
    counts = hvd.allgather_object(state)
    assert sum(counts) == 2 * sum(p.numel() for p in model.parameters())
    assert max(counts) < sum(counts)


@feature()
def post_local_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    ddp = DistributedDataParallel(models.make_model())
    subgroup, _ = dist.new_subgroups(group_size=2)
    state = hook.PostLocalSGDState(None, subgroup, start_localSGD_iter=1)
    ddp.register_comm_hook(state, hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    inner = torch.optim.SGD(ddp.parameters(), lr=0.1)
    optimizer = PostLocalSGDOptimizer(optim=inner, averager=averager)
    models.train(ddp, optimizer, own_batches())
    for parameter in ddp.parameters():
        copy = parameter.detach().clone()
        dist.broadcast(copy, 0)
        assert torch.equal(copy, parameter)


@feature(2)
def collectives_of_ddp_and_fsdp2() -> None:
    """The fewest: an allreduce for each bucket, an allgather and a reducescatter for each group."""
    from tests.parallel.process_group.check_fsdp import cpu_mesh, fully_shard

    mesh = cpu_mesh(2)
    calls: Any = mesh.get_group()._caller._numbers  # type: ignore[attr-defined]
    calls.clear()
    trained = DistributedDataParallel(models.make_model(), process_group=mesh.get_group())
    models.train(trained, models.adam(trained), own_batches())
    # DDP compares parameters, copies them, and copies how it has ordered them after the first step.
    assert calls == {"allgather": 1, "broadcast": 4, "allreduce": models.STEPS}, calls
    calls.clear()
    model = models.make_model()
    fully_shard(model, mesh=mesh)
    models.train(model, models.adam(model), own_batches())
    assert calls == {"allgather": models.STEPS, "reducescatter": models.STEPS}, calls


@feature(2)
def what_torch_has_for_gpus_only() -> None:
    """hvd.SyncBatchNorm has its own tests."""
    ddp = DistributedDataParallel(models.make_model())
    if torch.version.cuda is None:  # With CUDA torch looks for NCCL, not for this backend.
        with pytest.raises(TypeError, match="NCCL"):
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    with pytest.raises(ValueError, match="SyncBatchNorm"):
        nn.SyncBatchNorm(2)(torch.ones(2, 2))
