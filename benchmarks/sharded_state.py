"""How long a step takes where the optimizer's state is divided among the ranks, and where not.

    hvdlite-run -np 2 python benchmarks/sharded_state.py            # a minute
    hvdlite-run -np 2 python benchmarks/sharded_state.py --quick    # some seconds

Both optimizers are timed in turns in one job, each with its own copy of the network: 8.4 MB of
float32 in 8 layers, Adam, and a batch whose backward is short. Prints the median time of a whole
step, the bytes of state on a rank, and whether the weights are equal. Writes all figures to a file.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import asdict
from typing import Any

import torch
from measuring import Spread, Way, interleave, make_parser, parse, table, write
from torch import nn

import hvdlite.torch as hvd

WIDTH, LAYERS, BATCH = 512, 8, 16


def make_step(network: nn.Module, inputs: torch.Tensor, sharded: bool) -> tuple[Way, Any]:
    """Return a whole step, and its optimizer."""
    made = torch.optim.Adam(network.parameters(), lr=1e-4)
    optimizer = hvd.DistributedOptimizer(
        made, [(f"{sharded}.{name}", each) for name, each in network.named_parameters()],
        shard_state=sharded,
    )  # fmt: skip

    def step() -> None:
        optimizer.zero_grad()
        network(inputs).square().mean().backward()
        optimizer.step()

    return step, optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the tensors of state on this rank."""
    tensors = [v for state in optimizer.state.values() for v in state.values()]
    return sum(each.numel() * each.element_size() for each in tensors)


def main() -> None:
    """Measure, print and write."""
    parser = make_parser("How long a step with a divided state takes.", "sharded_state")
    parser.add_argument("--seconds", type=float, default=40)
    args = parse(parser, "5 seconds", seconds=5)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    hvd.init()
    network = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    inputs = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(hvd.rank()))
    names = {"DistributedOptimizer": False, "shard_state=True": True}
    networks = {name: copy.deepcopy(network) for name in names}
    made = {name: make_step(networks[name], inputs, sharded) for name, sharded in names.items()}
    for step, _ in made.values():
        for _ in range(3):
            step()
    weights = [
        torch.cat([each.detach().reshape(-1) for each in networks[name].parameters()])
        for name in names
    ]
    measured = interleave({name: step for name, (step, _) in made.items()}, args.seconds)
    if hvd.rank() != 0:
        return
    records = []
    for name, times in measured.items():
        spread, size = Spread.quartiles(times), state_bytes(made[name][1])
        records.append({"way": name, "seconds": asdict(spread), "state_bytes": size})
    rows = [
        [each["way"], str(Spread(**each["seconds"])), f"{each['state_bytes'] / 1e6:.2f} MB"]
        for each in records
    ]
    print(table(["Adam, 8.4 MB, a whole step", f"{hvd.size()} ranks", "state on a rank"], rows))
    plain, sharded = (each["seconds"]["median"] for each in records)
    sys.stdout.write(f"ratio {sharded / plain:.2f}, the same weights: {torch.equal(*weights)}\n")
    write(args.json, records)


if __name__ == "__main__":
    main()
