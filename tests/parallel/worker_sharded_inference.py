"""A rank that loads a checkpoint into a sharded model, of which no rank ever has all weights.

python -m tests.parallel.worker_sharded_inference FOLDER
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from hvdlite.torch import sharding
from hvdlite.torch.sharding.dtensor import DTensor, Shard

WIDTH, WIDE = 1024, 8192


class Feed(torch.nn.Module):
    """Two large weights, one of them tied to a second name, and a memory of what was fed last."""

    last: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, WIDE, bias=False)
        self.down = torch.nn.Linear(WIDE, WIDTH, bias=False)
        self.again = torch.nn.Linear(WIDTH, WIDE, bias=False)
        self.again.weight = self.up.weight
        self.register_buffer("last", torch.zeros(hvd.size(), 1, WIDE), persistent=False)

    def forward(self, x: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.up(x))
        self.last.scatter_(1, places[:, None, None].expand(y.shape[0], 1, WIDE), y[:, None])
        found: torch.Tensor = self.down(self.last[:, 0] + self.again(x))
        return found


def values(rows: range, columns: range) -> torch.Tensor:
    """A part of a weight of which each element is known without the others."""
    numbers = torch.tensor(rows)[:, None] * 31 + torch.tensor(columns) * 17
    return (numbers % 97).float() / 97 - 0.5


def own(length: int) -> range:
    """This rank's part of a dimension."""
    share = length // hvd.size()
    return range(hvd.rank() * share, (hvd.rank() + 1) * share)


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Let the kernel refuse this process more than so many bytes of its own; files do not count."""
    text = Path("/proc/self/status").read_text()
    now = int(re.findall(r"VmData:\s+(\d+) kB", text)[0]) * 1024
    before = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (now + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def save(folder: Path, mesh: Any) -> None:
    """Write a checkpoint of DTensors, and one of parts with layouts, each by rows."""
    parts = {
        "up": values(own(WIDE), range(WIDTH)),
        "down": values(own(WIDTH), range(WIDE)),
    }
    layout = sharding.layout([hvd.size()], [0, -1])
    layouts = {f"model.{name}.weight": layout for name in (*parts, "again")}
    state: dict[str, Any] = {name: {"weight": part} for name, part in parts.items()}
    hvd.checkpoint.save(folder / "parts", {"model": {**state, "again": state["up"]}}, layouts)
    placed = {
        name: {"weight": DTensor.from_local(part, mesh, [Shard(0)])} for name, part in parts.items()
    }
    hvd.checkpoint.save(folder / "dtensors", {"model": {**placed, "again": placed["up"]}})


def check_load(folder: Path, name: str) -> None:
    """A rank gets less memory than the model has, for its quarter and what threads need."""
    with torch.device("meta"):
        model = Feed()
    size = hvd.size()
    sharding.set_strategy(model.up, ((1, 1), (1, size)))
    sharding.set_strategy(model.down, ((1, size), (size, 1)))
    example = torch.randn(1, WIDTH), torch.zeros(1, dtype=torch.long)
    whole = sum(each.numel() * 4 for each in model.parameters())
    with limited_memory(whole * 7 // 8):
        sharding.shard(model, example=example)
        assert model.again.weight is model.up.weight
        assert model.up.weight.to_local().isnan().all(), "nothing is loaded yet"
        hvd.checkpoint.load(folder / name, {"model": model})
    up, down = values(own(WIDE), range(WIDTH)), values(range(WIDTH), own(WIDE))
    assert torch.equal(model.up.weight.to_local(), up)
    assert torch.equal(model.down.weight.to_local(), down)
    x = hvd.allgather(example[0], name="x")
    with pytest.raises(ValueError, match="last has no values: it was made on the meta device"):
        model(*example)
    model.last.zero_()
    with torch.no_grad():
        output = model(*example)
        inner = x @ up.t()
        wanted = hvd.allreduce((inner.relu() + inner) @ down.t(), op=hvd.Sum, name="y")
    close = torch.allclose(output[0], wanted[hvd.rank()], rtol=1e-4, atol=1e-2)
    assert close, (output[0] - wanted[hvd.rank()]).abs().max()
    assert model.last.to_local().shape == (size, 1, WIDE // size), "it is cut as what it keeps"


def check_other_parameters() -> None:
    """What takes the place of a parameter is what the part works with."""
    model = torch.nn.Linear(8, 8)
    example = torch.ones(2, 8)
    sharding.shard(model, example=example)
    zeros = {name: torch.zeros_like(each) for name, each in model.state_dict().items()}
    model.load_state_dict(zeros, assign=True)
    assert not model(example).any()
    model.double()
    assert model(example.double()).dtype == torch.float64


if __name__ == "__main__":
    hvd.init_process_group()
    check_other_parameters()
    save(Path(sys.argv[1]), sharding.mesh((hvd.size(),)))
    for each in ("parts", "dtensors"):
        check_load(Path(sys.argv[1]), each)
    dist.destroy_process_group()
    sys.stdout.write("is content\n")
