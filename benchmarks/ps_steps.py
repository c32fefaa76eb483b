"""Parts of `parameter_server.py`: what a step costs, beside allreduce."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from jobs import hvdlite_run, in_turns, run_command
from ps_cluster import WARM_STEPS, Job, Rows, spread_of, step_seconds
from resnet50 import SIZES

SCRIPT = Path(__file__).parent / "parameter_server.py"


def measure_step(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    return _in_turns(
        {
            "server, shared memory": lambda: step_seconds(Job(steps=args.steps)),
            "allreduce": lambda: allreduce_seconds(args.steps),
        },
        args.rounds,
    )


def measure_sockets(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    ways: dict[str, Callable[[], list[float]]] = {
        f"server, {way}": lambda way=way: step_seconds(Job(steps=args.steps, way=way))
        for way in ("ipc", "tcp")
    }
    return _in_turns(ways, args.rounds)


def _in_turns(ways: dict[str, Callable[[], list[float]]], rounds: int) -> Rows:
    return [
        (f"a step of 97.5 MiB, {name}", spread_of([each for job in jobs for each in job]))
        for name, jobs in in_turns(ways, rounds).items()
    ]


def allreduce_seconds(steps: int) -> list[float]:
    """Return the seconds of the steps of hvdlite's own DistributedOptimizer with 2 ranks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "steps.json"
        words = [str(SCRIPT), "--allreduce", str(file), "--steps", str(steps)]
        run_command([*hvdlite_run(2), sys.executable, *words], folder)
        found: list[float] = json.loads(file.read_text())
    return found[WARM_STEPS:]


def train_by_allreduce(args: argparse.Namespace) -> None:
    """Be a rank of `allreduce_seconds`."""
    import torch

    import hvdlite.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parameters, lr=0.01), [(str(n), p) for n, p in enumerate(parameters)]
    )
    seconds = []
    for _ in range(args.steps):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        hvd.barrier()
        begin = time.perf_counter()
        optimizer.step()
        seconds.append(hvd.allgather_object(time.perf_counter() - begin))
    if hvd.rank() == 0:
        args.allreduce.write_text(json.dumps([max(each) for each in seconds]))
    hvd.shutdown()


def measure_tiny(args: argparse.Namespace) -> Rows:
    """See the top of `parameter_server.py`."""
    return [
        (
            f"a step of 1,000 parameters of {what}",
            spread_of(step_seconds(Job(sizes=sizes, steps=10 * args.steps, wide=False))),
        )
        for what, sizes in (("16 elements", "1000x16"), ("4 KiB", "1000x1024"))
    ]
