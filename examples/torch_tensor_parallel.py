"""A network whose layers are cut among the ranks (tensor parallelism), compared with the whole one.

    hvdlite-run -np 4 python examples/torch_tensor_parallel.py

The first layer of each pair is cut by columns and the second one by rows, so that a pair needs one
sum over the ranks in forward and one in backward. All ranks see the same batch.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import hvdlite.torch as hvd


class Pair(nn.Module):
    """Up to a wide layer and down again, beside a direct way."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = inputs + self.down(torch.relu(self.up(inputs)))
        return result


def make_model(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(args.seed)
    return nn.Sequential(*(Pair(args.width, args.wide) for _ in range(args.pairs)))


def train(model: nn.Module, args: argparse.Namespace) -> list[float]:
    """The losses of all steps."""
    generator = torch.Generator().manual_seed(args.seed + 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)
    target = torch.randn(args.width, args.width, generator=generator)
    losses = []
    for _ in range(args.steps):
        inputs = torch.randn(args.batch_size, args.width, generator=generator)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), torch.tanh(inputs @ target))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Layers cut among the ranks.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--wide", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    hvd.init_process_group()
    whole = make_model(args)
    mesh = init_device_mesh("cpu", (hvd.size(),))
    plan = {}
    for index in range(args.pairs):
        plan |= {f"{index}.up": ColwiseParallel(), f"{index}.down": RowwiseParallel()}
    model = parallelize_module(make_model(args), mesh, plan)
    held = sum(parameter.to_local().numel() for parameter in model.parameters())
    cut, alone = train(model, args), train(whole, args)
    apart = max(abs(one - other) for one, other in zip(cut, alone, strict=True))
    if hvd.rank() == 0:
        total = sum(parameter.numel() for parameter in whole.parameters())
        print(
            f"ranks {hvd.size()}: {held} of {total} values on rank 0, loss {cut[0]:.4f} to "
            f"{cut[-1]:.4f}, at most {apart:.1e} from the whole network"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
