"""One of 8 ranks: a pipeline of two stages, whose blocks are cut by operators, FSDP2 and data.

python -m tests.parallel.worker_sharding_together
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import hvdlite.torch as hvd
from hvdlite.torch import sharding

try:
    from torch.distributed.fsdp import fully_shard
except ImportError:  # Its place before torch 2.6.
    from torch.distributed._composable.fsdp import fully_shard

STAGES, MICRO_BATCHES, STEPS, SHARE, WORDS, WIDTH = 2, 2, 20, 2, 4, 16


def stages() -> list[nn.Sequential]:
    """Both stages: a layer and a block, a block and a layer."""
    torch.manual_seed(0)
    blocks = [
        nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        for _ in range(STAGES)
    ]
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    return [nn.Sequential(first, blocks[0]), nn.Sequential(blocks[1], last)]


def batches(step: int) -> tuple[Any, Any]:
    """The inputs and targets of a step, by micro-batches."""
    generator = torch.Generator().manual_seed(step)
    shape = (MICRO_BATCHES, 4 * SHARE, WORDS, WIDTH)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def train_alone() -> tuple[nn.Module, list[float]]:
    model = nn.Sequential(*stages())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, foreach=False)
    losses = []
    for step in range(STEPS):
        inputs, targets = batches(step)
        optimizer.zero_grad()
        loss = (model(inputs.flatten(0, 1)) - targets.flatten(0, 1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def train_together(stage: nn.Module, mesh: Any) -> list[float]:
    place = hvd.rank() % 4
    is_first = hvd.rank() < 4
    partner = (hvd.rank() + 4) % 8
    optimizer = sharding.local_step(torch.optim.Adam(stage.parameters(), 1e-2, foreach=False))
    mine = slice(place * SHARE, (place + 1) * SHARE)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = torch.zeros(())
        ends = []
        for inputs, target in zip(*batches(step), strict=True):
            if is_first:
                output = stage(inputs[mine])
                dist.send(output.detach(), partner)
                ends.append((output, None))
            else:
                came = torch.empty(SHARE, WORDS, WIDTH)
                dist.recv(came, partner)
                loss = (stage(came.requires_grad_()) - target[mine]).square().mean()
                ends.append((loss / MICRO_BATCHES, came))
                total += loss.detach() / MICRO_BATCHES
        for output, came in ends:
            if came is None:
                gradient = torch.empty_like(output)
                dist.recv(gradient, partner)
                output.backward(gradient)
            else:
                output.backward()
                dist.send(came.grad, partner)
        optimizer.step()
        losses.append(2 * hvd.allreduce(total, name=f"loss.{step}").item())  # Half have none.
    return losses


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    hvd.init_process_group()
    mesh = init_device_mesh("cpu", (STAGES, 2, 2), mesh_dim_names=("stage", "data", "operators"))
    number = hvd.rank() // 4
    stage = stages()[number]
    block: Any = stage[1 - number]
    other: Any = stage[number]
    cuts: Any = {
        "linear1": ((1, 1, 1), (1, 2)), "linear2": ((1, 1, 2), (2, 1)),
        "self_attn.scaled_dot_product_attention": ((1, 2, 1, 1),) * 3,
    }  # fmt: skip
    example = torch.empty(SHARE, WORDS, WIDTH, device="meta")
    sharding.shard(block, mesh=mesh["operators"], example=example, strategies=cuts)
    assert block.linear1.weight.to_local().shape == (WIDTH, WIDTH)
    fully_shard(block, mesh=mesh["data"])
    fully_shard(other, mesh=mesh["data", "operators"])
    assert block.linear1.weight.to_local().shape == (WIDTH // 2, WIDTH), "cut by both"
    losses = train_together(stage, mesh)
    alone, wanted = train_alone()
    apart = max(abs(one - other) for one, other in zip(losses, wanted, strict=True))
    assert apart < 1e-10, (apart, losses, wanted)
    expected = dict(alone[number].named_parameters())
    for name, parameter in stage.named_parameters():
        difference = (parameter.full_tensor() - expected[name]).abs().max().item()
        assert difference < 1e-10, (name, difference)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write(f"is content: loss {wanted[0]:.4f} to {losses[-1]:.4f}\n")


if __name__ == "__main__":
    main()
