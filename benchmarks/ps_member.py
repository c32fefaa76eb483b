"""One process of a cluster that `parameter_server.py` measures; it writes what it saw as JSON.

python benchmarks/ps_member.py WORDS   # the words of `Job`, as JSON; the role by HVDLITE_ROLE
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from resnet50 import SIZES

from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.shared_memory import SharedMemory
from hvdlite.ps.server.server import Server
from hvdlite.torch import ps

RATE = 0.01


def sizes_of(what: str) -> list[int]:
    """Return the elements of the tensors: "resnet50", or NUMBERxELEMENTS."""
    if what == "resnet50":
        return list(SIZES)
    number, _, elements = what.partition("x")
    return [int(elements)] * int(number)


def choose_way(way: str) -> None:
    """Let bulk data go by "memory", as by default, only by "ipc", or only by "tcp"."""
    if way == "tcp":
        Listener.open_memory = lambda self: None  # type: ignore[method-assign]
    elif way == "ipc":
        SharedMemory.find = lambda self, payload: None  # type: ignore[method-assign]


def note_snapshots(file: Path) -> None:
    """Write at the end how long snapshots have kept this server."""
    seconds: list[float] = []
    save = Server._save

    def timed(self: Server, name: str) -> None:
        begin = time.perf_counter()
        before = self._saved.get(name)
        save(self, name)
        if self._saved.get(name) != before:
            seconds.append(time.perf_counter() - begin)

    Server._save = timed  # type: ignore[method-assign]
    atexit.register(lambda: file.write_text(json.dumps(seconds)))


class SlowSum(torch.autograd.Function):
    """The sum of a tensor, whose backward takes some seconds."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        """Return the sum."""
        ctx.shape, ctx.seconds = tensor.shape, seconds
        return tensor.sum()

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return ones, later."""
        time.sleep(ctx.seconds)
        return torch.ones(ctx.shape), None


def run_backward(parameters: list[torch.nn.Parameter], seconds: float) -> None:
    """Compute the gradients of all parameters, the last ones first."""
    losses = []
    for parameter in parameters:
        parameter.grad = None
        losses.append(SlowSum.apply(parameter, seconds / len(parameters)))
    torch.stack(losses).sum().backward()


def train(words: dict[str, Any], folder: Path) -> None:
    """Take part; a worker writes when each of its steps began and ended."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes_of(words["sizes"])]
    named = [(f"p{number}", each) for number, each in enumerate(parameters)]
    optimizer = ps.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=RATE), named, mode=words["mode"],
        staleness=words["staleness"],
    )  # fmt: skip
    slow = words["slow"] if ps.rank() == ps.size() - 1 else 0.0
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    times = []
    ps.barrier()
    end = time.monotonic() + words["seconds"] if words["seconds"] else float("inf")
    for _ in range(words["steps"]):
        time.sleep(words["compute"] + slow)
        if words["mode"] == "sync":
            ps.barrier()
        if words["backward"]:
            run_backward(parameters, words["backward"])
        begin = time.monotonic()
        optimizer.step()
        times.append((begin, time.monotonic()))
        if words["mode"] != "sync" and time.monotonic() > end:
            break
    if words["mode"] == "sync":
        expected = -RATE * words["steps"]
        assert abs(parameters[-1].detach()[0].item() - expected) < 1e-3
    (folder / f"worker{ps.rank()}.json").write_text(json.dumps(times))
    ps.shutdown()


def main() -> None:
    """Be the process that the environment names."""
    words = json.loads(sys.argv[1])
    folder = Path(words["folder"])
    is_server = os.environ["HVDLITE_ROLE"] == "server"
    torch.set_num_threads(len(os.sched_getaffinity(0)) if is_server and words["wide"] else 1)
    choose_way(words["way"])
    if is_server:
        note_snapshots(folder / f"{os.environ['HVDLITE_NODE_ID']}.{os.getpid()}.json")
    ps.init()
    train(words, folder)


if __name__ == "__main__":
    main()
