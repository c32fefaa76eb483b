"""Elastic training of the examples' networks: the workers of commit, steady and the soak."""

from __future__ import annotations

import argparse
import copy
import mmap
import multiprocessing
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from elastic_soak_worker import digest
from measuring import Spread
from training import NETWORKS, Task

import hvdlite.torch as hvd
from hvdlite.common.connections.link import Link
from hvdlite.common.runtime import worlds
from hvdlite.common.runtime.current import current

if TYPE_CHECKING:
    from elastic_worker import Notes

EXAMPLES = Path(__file__).parent.parent / "examples"
CHECKS = 10_000
PATIENCE_SECONDS = 60.0
WARM_STEPS = 2
TURN_LOOK_SECONDS = 0.005


def make(network: str, distributed: bool = True, **options: Any) -> tuple[Task, Any]:
    """Return a task with its network, the same on all ranks, and an optimizer.

    The optimizer reduces gradients if it is `distributed`.
    """
    sys.path.append(str(EXAMPLES))
    torch.manual_seed(1)
    task = NETWORKS[network](**options)
    kind: Any = torch.optim.AdamW if network == "gpt" else torch.optim.SGD
    more = {} if network == "gpt" else {"momentum": 0.9}
    optimizer = kind(task.model.parameters(), lr=1e-3, **more)
    if not distributed:
        return task, optimizer
    return task, hvd.DistributedOptimizer(optimizer, task.model.named_parameters())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """Return all tensors in dicts and lists."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def timed(function: Any) -> float:
    """Return the seconds of a call that all ranks begin together."""
    hvd.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def commit(notes: Notes, args: argparse.Namespace) -> None:
    """Commit after each step, in each way; note the medians of this rank."""
    hvd.init()
    for kind in ("copy", "step"):
        task, optimizer = make(args.network)

        def step(task: Task = task, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            task.loss(task.model).backward()
            optimizer.step()

        state = hvd.elastic.TorchState(task.model, optimizer, commit=kind, step=0)
        states = [task.model.state_dict(), optimizer.state_dict()]
        step()
        state.commit()
        states = [task.model.state_dict(), optimizer.state_dict()]
        tensors = tensors_of(states)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        source, target = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
        figures: dict[str, list[float]] = {name: [] for name in ("step", "commit", "copy", "deep")}
        for number in range(WARM_STEPS + args.count):
            took = {
                "step": timed(step),
                "commit": timed(state.commit),
                "copy": timed(lambda: target.copy_(source)),  # noqa: B023 - called at once
                "deep": timed(lambda: copy.deepcopy(states)),  # noqa: B023 - called at once
            }
            if number >= WARM_STEPS:
                for name, seconds in took.items():
                    figures[name].append(seconds)
        found = {
            "commit": kind, "seconds": vars(Spread.quartiles(figures["commit"])),
            "plain_copy": median(figures["copy"]), "deep_copy": median(figures["deep"]),
            "step": median(figures["step"]), "bytes": nbytes,
        }  # fmt: skip
        notes.write("commit", found=found)


class Checks:
    """The checks for news of hosts of one turn, and the seconds that they take."""

    def __init__(self, state: Any) -> None:
        self._check = state.check_host_updates if worlds.elastic() else None
        self.seconds = 0.0

    def __call__(self) -> None:
        """Check, in an elastic job."""
        if self._check is not None:
            start = time.perf_counter()
            self._check()
            self.seconds += time.perf_counter() - start


def link_seconds() -> float:
    """Return the CPU time so far of the thread that is connected with the driver, if any."""
    for thread in threading.enumerate():
        if thread.name == "hvdlite-elastic":
            told = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            return int(told.split()[0]) / 1e9
    return 0.0


def steady(notes: Notes, args: argparse.Namespace) -> None:
    """Make steps whenever it is this job's turn; each checks for news of hosts if it is elastic."""
    hvd.init()
    task, optimizer = make("gpt")
    state = hvd.elastic.TorchState(task.model, optimizer, step=0)
    turn = 0
    while True:
        turn += 1
        file = notes.end.with_name(f"turn{turn}")
        while not (file.exists() or notes.end.exists()):
            time.sleep(TURN_LOOK_SECONDS)
        if not file.exists():
            break
        hvd.barrier()
        checks = Checks(state)
        start, cpu = time.perf_counter(), time.process_time()
        for _ in range(args.count):
            optimizer.zero_grad()
            task.loss(task.model).backward()
            optimizer.step()
            checks()
        took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
        took["checks"] = checks.seconds
        each = {name: seconds / args.count for name, seconds in took.items()}
        notes.write("turn", turn=turn, link=link_seconds(), **each)
    if worlds.elastic():
        note_checks(notes, state)


def note_checks(notes: Notes, state: Any) -> None:
    """Note the seconds of a check without news, and what ranks and driver were sent meanwhile."""
    sent: list[str] = []
    send = Link.send

    def count(self: Link, kind: str, *fields: Any) -> None:
        sent.append(kind)
        send(self, kind, *fields)

    Link.send = count  # type: ignore[method-assign]
    remove = current().engine.observe(lambda segment: sent.append("collective"))
    start = time.perf_counter()
    for _ in range(CHECKS):
        state.check_host_updates()
    seconds = (time.perf_counter() - start) / CHECKS
    remove()
    Link.send = send  # type: ignore[method-assign]
    notes.write("checked", check=seconds, sent=len(sent))


# -- the soak

SMALL = {"resnet50": {"images": 2, "pixels": 32}, "gpt": {}}
COMMITS_EVERY = {"resnet50": 1, "gpt": 3}  # The first by "step".


def load_batch(network: str, task: Task, number: int, rank: int) -> None:
    """Put the batch of a step and rank into the task."""
    generator = torch.Generator().manual_seed(number * 64 + rank)
    if network == "gpt":
        characters = int(task.labels.max()) + 1
        for codes in (task.inputs, task.labels):
            codes.copy_(torch.randint(characters, codes.shape, generator=generator))
    else:
        task.inputs.copy_(torch.randn(task.inputs.shape, generator=generator))
        task.labels.copy_(torch.randint(1000, task.labels.shape, generator=generator))


def digest_of(task: Task) -> str:
    """Return the digest of all parameters."""
    return digest([parameter.detach().numpy() for parameter in task.model.parameters()])


def learn(notes: Notes, args: argparse.Namespace) -> None:
    """Train a network until the end; note the step and weights with which each world begins."""
    notes.write_alone("started")
    hvd.init()
    task, optimizer = make(args.network, **SMALL[args.network])
    every = COMMITS_EVERY[args.network]
    kind = "step" if every == 1 else "copy"

    @hvd.elastic.run
    def loop(state: Any) -> None:
        notes.write("began", step=state.step, digest=digest_of(task))
        ended = False
        while not ended:
            optimizer.zero_grad()
            load_batch(args.network, task, state.step, hvd.rank())
            task.loss(task.model).backward()
            flag = torch.tensor([float(notes.end.exists())])
            ended = bool(hvd.allreduce(flag, op=hvd.Sum, name="end"))
            optimizer.step()
            state.step += 1
            if state.step % every == 0 or ended:
                state.commit()
        notes.write("done", step=state.step, digest=digest_of(task))

    loop(hvd.elastic.TorchState(task.model, optimizer, commit=kind, step=0))


class Shares:
    """Memory of two processes, each of which has written one share of the gradients."""

    def __init__(self, sizes: list[int]) -> None:
        memory = mmap.mmap(-1, 2 * 4 * sum(sizes))
        flat = torch.frombuffer(memory, dtype=torch.float32).view(2, -1)
        self.of = [torch.split(row, sizes) for row in flat]
        self.barrier = multiprocessing.get_context("fork").Barrier(2)


def replay(network: str, sizes: list[int], wanted: set[int]) -> dict[int, str]:
    """Return the digests before the `wanted` steps of an undisturbed run of worlds of `sizes`.

    Two processes compute the gradients of a rank each, and exchange them without hvdlite.
    """
    torch.set_num_threads(1)
    task, optimizer = make(network, distributed=False, **SMALL[network])
    shares = Shares([parameter.numel() for parameter in task.model.parameters()])
    arguments = network, task, optimizer, sizes, shares
    other = multiprocessing.get_context("fork").Process(target=walk, args=(*arguments, set(), 1))
    other.start()
    try:
        found = walk(*arguments, wanted, 0)
        other.join()
    finally:
        other.kill()
    return found


def walk(
    network: str, task: Task, optimizer: Any, sizes: list[int], shares: Shares, wanted: set[int],
    rank: int,
) -> dict[int, str]:  # fmt: skip
    """Make all steps as one of two processes; return the digests before the `wanted` ones."""
    found = {}
    parameters = list(task.model.parameters())
    for number, size in enumerate([*sizes, 0]):
        if number in wanted:
            found[number] = digest_of(task)
        if not size:
            break
        optimizer.zero_grad()
        load_batch(network, task, number, rank if size == 2 else 0)
        task.loss(task.model).backward()
        if size == 2:
            exchange(parameters, shares, rank)
        optimizer.step()
    return found


def exchange(parameters: list[torch.nn.Parameter], shares: Shares, rank: int) -> None:
    """Make the gradients the mean of both processes' gradients."""
    for share, parameter in zip(shares.of[rank], parameters, strict=True):
        share.copy_(parameter.grad.reshape(-1))
    shares.barrier.wait(PATIENCE_SECONDS)
    for first, second, parameter in zip(*shares.of, parameters, strict=True):
        parameter.grad = ((first + second) / 2).view(parameter.shape)
    shares.barrier.wait(PATIENCE_SECONDS)
