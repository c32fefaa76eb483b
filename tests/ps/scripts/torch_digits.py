"""A process of a cluster that trains the digits, in whatever role; a worker saves its weights.

`DIE=NODE:STEP` kills a worker before a step, once; `SAY=NODE:STEP,...` lets it make the files
`reached` and `reached-STEP` there; `HALT=STEP` lets all workers stop there until somebody writes
to the FIFO `go`, and `HALT=NODE:STEP` one. `SLOW=SECONDS` lets the last worker wait in each step,
until there is a file `hurry`; with `ENDLESS=1` all go on until then, and for so many steps more as
they are to make otherwise. That is for sync, where nobody is further ahead than that. A worker
that joins has the samples of another one.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch

from hvdlite.ps.layouts import blocks
from hvdlite.ps.scheduler import registry
from hvdlite.torch import ps
from tests.ps.digits import OPTIMIZERS, batch, loss_of, network


def main(
    folder: Path, mode: str, staleness: int | None, name: str, steps: int,
    partition: str = "element",
) -> None:  # fmt: skip
    torch.set_num_threads(1)
    ps.init()
    model = network()
    optimizer = ps.DistributedOptimizer(
        OPTIMIZERS[name](model.parameters()), model.named_parameters(), mode=mode,
        staleness=staleness, partition=partition,
    )  # fmt: skip
    # Its number is by the order in which workers come.
    node = os.environ.get("HVDLITE_NODE_ID", "")
    own = ps.rank() % ps.size()
    is_last = node == f"worker{ps.size() - 1}"
    slow = float(os.environ.get("SLOW", "0")) if is_last else 0.0
    times = [time.monotonic()]
    first = optimizer.finished_steps
    is_endless = bool(os.environ.get("ENDLESS"))
    for step in endless(folder, first, steps, is_last) if is_endless else range(first, steps):
        if os.environ.get("DIE") == f"{node}:{step}" and not (folder / "died").exists():
            (folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if f"{node}:{step}" in os.environ.get("SAY", "").split(","):
            (folder / f"reached-{step}").touch()
            (folder / "reached").touch()
        if os.environ.get("HALT") in (f"{step}", f"{node}:{step}"):
            (folder / f"halted-{node}").touch()
            (folder / "go").read_text()
        optimizer.zero_grad()
        loss_of(model, *batch(step, own, ps.size())).backward()
        if slow and not (folder / "hurry").exists():
            time.sleep(slow)
        optimizer.step()
        times.append(time.monotonic())
    torch.save(model.state_dict(), folder / f"worker{ps.rank()}.pt")
    (folder / f"{node}.json").write_text(json.dumps(times))
    ps.shutdown()


def endless(folder: Path, first: int, more: int, decides: bool) -> Iterator[int]:
    """Yield steps until `more` have come since the worker that `decides` has found `hurry`."""
    end = folder / "end"
    for step in count(first):
        if decides and not end.exists() and (folder / "hurry").exists():
            (folder / "end.new").write_text(str(step + more))
            (folder / "end.new").rename(end)
        if end.exists() and step >= int(end.read_text()):
            return
        yield step


def main_in_parts(folder: Path, part_bytes: int, *words: Any) -> None:
    """Train with tensors that are cut into parts of so many bytes, of which blocks have two."""
    registry.PART_BYTES, blocks.BLOCK_BYTES = part_bytes, 2 * part_bytes
    main(folder, *words)


def main_with_schedule(folder: Path, steps: int, overflow_step: int) -> None:
    """Train with a schedule, two backward passes a step and a loss scaler.

    Worker 1 has an infinite gradient in one step.
    """
    torch.set_num_threads(1)
    ps.init()
    model = network()
    optimizer = ps.DistributedOptimizer(
        OPTIMIZERS["sgd"](model.parameters()), model.named_parameters(), op=ps.Sum,
        backward_passes_per_step=2,
    )  # fmt: skip
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(2):
            loss = loss_of(model, *batch(2 * step + part, ps.rank(), ps.size()))
            scaler.scale(loss).backward()
        if step == overflow_step and ps.rank() == 1:
            model[0].weight.grad[3, 4] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
    torch.save(model.state_dict(), folder / f"worker{ps.rank()}.pt")
    ps.shutdown()
