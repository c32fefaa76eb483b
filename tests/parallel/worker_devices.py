"""One rank that trains on tensors which take the way of an accelerator, beside training alone.

All values are small multiples of powers of 2, so that sums are exact and bits can be compared.
"""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import copy

import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from hvdlite.torch.mpi_ops import runner

STEPS = 4


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            count = torch.arange(parameter.numel()).view(parameter.shape)
            parameter.copy_((count + number) % 5 - 2)
    return model


def step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor) -> None:
    optimizer.zero_grad()
    (model(rows).sum(1) / len(rows)).sum().backward()
    optimizer.step()


def main() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    alone, model = make_model(), make_model()
    if rank:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    plain = torch.optim.SGD(alone.parameters(), lr=0.25)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    rows = torch.arange(4 * 4 * size).view(4 * size, 4).remainder(7).float()
    for _ in range(STEPS):
        step(alone, plain, rows)
        step(model, optimizer, rows[rank::size])
    hvd.broadcast_optimizer_state(optimizer, 0)
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine, other), (mine, other)
    assert hvd.allgather_object(rank) == list(range(size))
    kinds = current().engine.devices.agreement.kinds
    device = runner.adapter._find("cpu")
    staged = copy.copy(vars(device)["staging"].count)
    print(f"rank {rank} trained on {sorted(kinds)}, staged {staged}", flush=True)
    hvd.shutdown()


class Counting:
    """Counts tensors that pass through memory of the host."""

    def __init__(self, staging: object) -> None:
        self.count = 0
        self._staging = staging

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self._staging(tensor)  # type: ignore[no-any-return, operator]


if __name__ == "__main__":
    found = runner.adapter._find("cpu")
    found.staging = Counting(found.staging)
    main()
