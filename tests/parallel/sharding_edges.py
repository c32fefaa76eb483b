"""Sharded parts of unusual modules, against one process, and what is refused in them.

python -m tests.parallel.sharding_edges
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.torch import sharding

SHARE, WIDTH = 4, 8


def whole_batch() -> Any:
    return torch.arange(float(SHARE * hvd.size() * WIDTH)).reshape(-1, WIDTH).sin()


def own(batch: Any) -> Any:
    return batch[hvd.rank() * SHARE : (hvd.rank() + 1) * SHARE]


class Tied(torch.nn.Module):
    """Two names for one weight, and for one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.first.register_buffer("same", self.scale, persistent=False)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * self.first.same) + self.scale


def check_tied() -> None:
    torch.manual_seed(3)
    model, batch = Tied(), whole_batch()
    expected = own(model(batch)).detach()
    cut = {"second.weight": (hvd.size(), 1)}
    sharded = sharding.shard(model, parameter_plan=cut, example=own(batch))
    assert torch.allclose(sharded(own(batch)), expected, atol=1e-5)
    assert sharded.second.weight is sharded.first.weight
    assert sharded.first.same is sharded.scale
    assert sharded.first.weight.to_local().shape == (WIDTH // hvd.size(), WIDTH)


def check_modules_without_parameters() -> None:
    batch = whole_batch()
    relu = sharding.shard(torch.nn.ReLU(), mesh=sharding.mesh())
    assert torch.equal(relu(own(batch)), own(batch).relu())


CHECKS = [check_tied, check_modules_without_parameters]

if __name__ == "__main__":
    hvd.init_process_group()
    for check in CHECKS:
        check()
    dist.destroy_process_group()
    sys.stdout.write("is content\n")
