"""A process of a cluster that trains the digits, in whatever role; a worker saves its weights."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import torch

from hvdlite.torch import ps
from tests.ps.digits import OPTIMIZERS, batch, loss_of, network


def main(folder: Path, mode: str, staleness: int | None, name: str, steps: int) -> None:
    torch.set_num_threads(1)
    ps.init()
    model = network()
    optimizer = ps.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()), model.named_parameters(), mode=mode,
        staleness=staleness,
    )  # fmt: skip
    slow = float(os.environ.get("SLOW", "0")) if ps.rank() == ps.size() - 1 else 0.0
    for step in range(optimizer.finished_steps, steps):
        if os.environ.get("DIE") == f"{ps.rank()}:{step}" and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(model, *batch(step, ps.rank(), ps.size())).backward()
        time.sleep(slow)
        optimizer.step()
    torch.save(model.state_dict(), folder / f"worker{ps.rank()}.pt")
    ps.shutdown()


if __name__ == "__main__":
    folder, mode, staleness, name, steps = sys.argv[1:]
    main(Path(folder), mode, int(staleness) if staleness != "-" else None, name, int(steps))
