"""Random jobs of a parameter server, of which anything is killed, stopped, added and taken away.

    python -m tests.ps.soak --jobs 20 --seed 1

Each job is two clusters of processes, one after the other: the second one, of another number of
servers, loads what the first one has saved at its end. Every version has a snapshot, so that no
push may be lost or count twice: the last values are those of a serial oracle, to the bit, in every
worker. Jobs of numpy push integers, whose sum does not depend on an order, to a table and to rows
in sync, ssp or async; those of PyTorch train the digits with Adam in sync. A job that hangs, ends
with an error or leaves a process fails, and the command ends with the seed by which it is repeated.
"""

from __future__ import annotations

import argparse
import builtins
import errno
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdlite.numpy import ps
from hvdlite.ps import context
from hvdlite.ps.context import PREFIX, serve
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC
from hvdlite.ps.tables.row_store import ZEROS, RowsSpec
from hvdlite.torch import ps as torch_ps
from hvdlite.torch.ps import optimizer as ps_optimizer
from tests.ps import processes
from tests.ps.digits import OPTIMIZERS, batch, loss_of, network, train_in_one
from tests.ps.processes import Cluster, cluster
from tests.ps.sites import Site

SIZES, ROWS, LENGTH = (300, 7, 40), 50, 3
PART_BYTES = 800
SAVE_EVERY = 9  # Steps of worker 0.
SLOW_SECONDS = 0.01
LIMIT_SECONDS = 240  # For a process; a machine may be busy.
KINDS = [*["kill"] * 6, *["stop"] * 2, *["join"] * 2, *["leave"] * 2, "full disk"]


def gradients_of(life: int, step: int, worker: int) -> list[np.ndarray[Any, Any]]:
    made = np.random.default_rng([life, step, worker])
    return [made.integers(-99, 99, size).astype(float) for size in SIZES]


def rows_of(life: int, step: int, worker: int) -> tuple[Any, Any]:
    made = np.random.default_rng([life, step, worker, 1])
    ids = made.permutation(ROWS)[:5]
    return ids, made.integers(-99, 99, (5, LENGTH)).astype(float)


# -- what the processes run


def main(folder: Path, life: int, framework: str, mode: str, staleness: int | None) -> None:
    """Be a member of a job, in whatever role."""
    let_disk_be_full(folder)
    torch.set_num_threads(1)
    ps.init()
    if ps.role() == "worker":
        (folder / f"begun-{life}-{ps.rank()}").touch()
    if framework == "torch":
        train(folder, life)
    else:
        add_up(folder, life, mode, staleness)
    ps.shutdown()


def let_disk_be_full(folder: Path) -> None:
    """Let no table and no state be written while there is a file `full`."""
    really_open = builtins.open

    def open_(file: Any, mode: str = "r", *words: Any, **more: Any) -> Any:
        if str(file).endswith(".unfinished") and (folder / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return really_open(file, mode, *words, **more)

    builtins.open = open_  # type: ignore[assignment]


class Turns:
    """The steps of a worker: it saves and lets servers go meanwhile, and stops at the end."""

    def __init__(self, folder: Path, life: int, may_be_apart: int | None) -> None:
        self._folder, self._life, self._apart = folder, life, may_be_apart

    def go_on(self, step: int) -> bool:
        """Return whether there is a step of this number; None of `may_be_apart`: until `hurry`."""
        if (hurry := self._folder / "hurry").exists() and self._apart is None:
            return False
        end = self._folder / f"end-{self._life}"
        if ps.rank() == 0:
            if hurry.exists() and not end.exists():
                assert self._apart is not None
                put(end, str(step + self._apart + 2))
            self._obey(step)
        if not hurry.exists():
            time.sleep(SLOW_SECONDS)
        return not end.exists() or step < int(end.read_text())

    def _obey(self, step: int) -> None:
        if (order := self._folder / "servers").exists():
            wanted = int(order.read_text())
            order.unlink()
            try:
                ps.scale_servers(wanted)
            except Exception as error:  # There are fewer already: a change was given up.
                assert "cannot be left of" in str(error), error
        if step % SAVE_EVERY == SAVE_EVERY - 1:
            save(self._folder / "between", once=True)


def save(folder: Path, *, once: bool = False) -> None:
    """Save, again where the disk is full, but for a save that happens `once`."""
    while True:
        try:
            ps.save(folder)
            return
        except (OSError, ValueError) as error:
            # In sync a worker that has come back may have a step to make again before.
            assert "No space" in str(error) or "it has come back" in str(error), error
            if once:
                return


def put(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    path.with_suffix(f".{os.getpid()}").write_text(text)
    path.with_suffix(f".{os.getpid()}").rename(path)


def add_up(folder: Path, life: int, mode: str, staleness: int | None) -> None:
    """Push integers to a table and to rows, each in its own steps; note how many, and the sums."""
    if ps.role() == "server":
        serve()
    worker, number = context.worker(), ps.rank()
    specs = [TensorSpec(str(n), "float64", (size,)) for n, size in enumerate(SIZES)]
    values = [np.zeros(size) for size in SIZES]
    options = TableOptions(mode, staleness, average=False, part_bytes=PART_BYTES)
    table = worker.declare(PREFIX + "t", specs, options, lambda: values)
    spec = RowsSpec(ROWS, LENGTH, "float64", initializer=ZEROS)
    tensor = TensorSpec(PREFIX + "rows", "float64", (ROWS, LENGTH))
    rows = worker.declare_rows(tensor, options._replace(rows=spec.fields))
    if life:
        ps.load(folder / "saved")
    every = np.arange(ROWS)
    table.pull(values)
    turns = Turns(folder, life, {SYNC: 0, SSP: (staleness or 0) + 1}.get(mode))
    step = min(table.clock, rows.clock)
    while turns.go_on(step):
        if table.clock == step:
            table.push(gradients_of(life, step, number), {})
            table.pull(values)
        if rows.clock == step:
            rows.push(*rows_of(life, step, number)).wait()
            rows.pull(every[:9]).wait()
        step += 1
    put(folder / f"steps-{life}-{number}", str(step))
    ps.barrier()
    table.pull(values)
    found = np.concatenate([*values, rows.pull(every).wait().reshape(-1)])
    put(folder / f"found-{life}-{number}", json.dumps(found.tolist()))
    if number == 0:
        save(folder / "saved")
    ps.barrier()


def train(folder: Path, life: int) -> None:
    """Train the digits."""
    ps_optimizer.PART_BYTES = 2048
    model = network()
    optimizer = torch_ps.DistributedOptimizer(
        OPTIMIZERS["adam"](model.parameters()), model.named_parameters()
    )
    before = ps.load(folder / "saved") if life else 0
    turns = Turns(folder, life, 0)
    step = optimizer.finished_steps
    while turns.go_on(step):
        optimizer.zero_grad()
        loss_of(model, *batch(before + step, ps.rank(), ps.size())).backward()
        optimizer.step()
        step += 1
    put(folder / f"steps-{life}-{ps.rank()}", str(step))
    torch.save(model.state_dict(), folder / f"found-{life}-{ps.rank()}.{os.getpid()}")
    (folder / f"found-{life}-{ps.rank()}.{os.getpid()}").rename(
        folder / f"found-{life}-{ps.rank()}"
    )
    if ps.rank() == 0:
        save(folder / "saved")
    ps.barrier()


# -- what happens to them


class Life:
    """One cluster of a job, and what is done to it."""

    def __init__(self, job: Cluster, life: int, servers: int, workers: int, dice: Any) -> None:
        self._job, self._life, self._dice = job, life, dice
        self._workers, self._first, self._servers = workers, servers, servers
        self.events: Counter[str] = Counter()

    def run(self, events: int) -> None:
        """Let so many things happen; then wait for the end."""
        for number in range(self._workers):
            self._job.wait_for_file(f"begun-{self._life}-{number}")
        while self.events.total() < events:
            kind = self._dice.choice(KINDS)
            getattr(self, f"_{kind.replace(' ', '_')}")()
            self.events[kind] += 1
            time.sleep(self._dice.uniform(0.0, 0.4))
        (self._job.folder / "hurry").touch()
        self._job.wait_until(lambda: not self._here("scheduler", "server", "worker"))

    def _here(self, *roles: str) -> list[str]:
        processes = self._job.processes.items()
        return [n for n, each in processes if each.is_alive() and n.rstrip("0123456789") in roles]

    def _kill(self) -> None:
        """Kill one process, several, all of a role or all; start them again."""
        every = self._here("scheduler", "server", "worker")
        role = self._dice.choice(["scheduler", "server", "worker"])
        some = self._dice.choice([1, 1, 1, 2, 3])
        chosen = self._dice.choice(
            [*[self._dice.sample(every, min(some, len(every)))] * 8, self._here(role), every]
        )
        for name in [*chosen]:
            try:
                self._job.kill(name)
            except ProcessLookupError:  # A server that was to leave has ended meanwhile.
                chosen = [each for each in chosen if each != name]
        time.sleep(self._dice.choice([0.0, 0.0, 0.2]))
        for name in chosen:
            role = name.rstrip("0123456789")
            number = int(name.removeprefix(role))
            joins = {"HVDLITE_PS_JOIN": "1"} if number >= self._first and role == "server" else {}
            self._job.start(role, number, **joins)

    def _stop(self) -> None:
        chosen = self._dice.choice(self._here("scheduler", "server", "worker"))
        os.kill(self._job.pid(chosen), signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.0, 1.0))
        os.kill(self._job.pid(chosen), signal.SIGCONT)

    def _join(self) -> None:
        alive = self._here("server")
        if len(alive) < 4:
            free = next(n for n in range(self._first, 9) if f"server{n}" not in alive)
            self._job.start("server", free, HVDLITE_PS_JOIN="1")

    def _leave(self) -> None:
        most = max(1, len(self._here("server")) - 1)
        put(self._job.folder / "servers", str(self._dice.randint(1, most)))

    def _full_disk(self) -> None:
        (self._job.folder / "full").touch()
        time.sleep(self._dice.uniform(0.0, 0.7))
        (self._job.folder / "full").unlink()


def check(folder: Path, framework: str, workers: int, lives: int) -> int:
    """Compare what all workers have found with the oracle; return how many steps they have made."""
    total, in_table, in_rows = 0, [np.zeros(size) for size in SIZES], np.zeros((ROWS, LENGTH))
    for life in range(lives):
        steps = [int((folder / f"steps-{life}-{n}").read_text()) for n in range(workers)]
        total += sum(steps)
        if framework == "torch":
            wanted = train_in_one("adam", workers, total // workers)
            for number in range(workers):
                found = torch.load(folder / f"found-{life}-{number}")
                assert all(torch.equal(found[name], wanted[name]) for name in wanted), (life, steps)
            continue
        for number, count in enumerate(steps):
            for step in range(count):
                gradients = gradients_of(life, step, number)
                in_table = [a + b for a, b in zip(in_table, gradients, strict=True)]
                ids, rows = rows_of(life, step, number)
                in_rows[ids] += rows
        sums = np.concatenate([*in_table, in_rows.reshape(-1)])
        for number in range(workers):
            found = np.array(json.loads((folder / f"found-{life}-{number}").read_text()))
            assert (found == sums).all(), (life, number, steps, np.flatnonzero(found != sums))
    return total


def run_job(folder: Path, seed: int, events: int) -> tuple[Counter[str], int]:
    """Run a job; return what has happened to it, and how many steps its workers have made."""
    dice = random.Random(seed)
    framework = dice.choice(["numpy", "numpy", "numpy", "torch"])
    mode = SYNC if framework == "torch" else dice.choice([SYNC, ASYNC, SSP])
    staleness = dice.randint(0, 3) if mode == SSP else None
    workers = dice.randint(1, 3)
    print(f"{framework}, {mode} {staleness}, {workers} workers", end=" ", flush=True)
    happened: Counter[str] = Counter()
    for life in range(2):
        servers = dice.randint(1, 3)
        words = life, framework, mode, staleness
        variables = {
            "HVDLITE_PS_SNAPSHOT": str(folder / f"snapshots-{life}"),
            "HVDLITE_PS_SNAPSHOT_EVERY": "1",
            "HVDLITE_PS_WORKERS": "independent",
        }
        with cluster(Site(folder), servers, workers, main, *words, **variables) as job:
            this = Life(job, life, servers, workers, dice)
            this.run(events)
            happened += this.events
        (folder / "hurry").unlink()
        for log in folder.glob("*.log"):
            log.rename(log.with_suffix(f".{life}"))
    return happened, check(folder, framework, workers, 2)


def run(arguments: list[str] | None = None) -> None:
    """Run the jobs that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1, help="of the first job; others follow")
    parser.add_argument(
        "--events", type=int, default=5, help="in each of the two clusters of a job"
    )
    given = parser.parse_args(arguments)
    processes.LIMIT_SECONDS = LIMIT_SECONDS
    happened: Counter[str] = Counter()
    steps, begin = 0, time.monotonic()
    for seed in range(given.seed, given.seed + given.jobs):
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        start = time.monotonic()
        print(f"job {seed}:", end=" ", flush=True)
        try:
            events, of_job = run_job(folder, seed, given.events)
        except BaseException:
            print(f"\njob {seed} has failed: --seed {seed} --jobs 1; what it has said: {folder}")
            raise
        shutil.rmtree(folder)
        happened += events
        steps += of_job
        print(f"{of_job} steps, {time.monotonic() - start:.0f} s", flush=True)
    kinds = ", ".join(f"{count} {kind}" for kind, count in happened.most_common())
    seconds = time.monotonic() - begin
    print(f"{given.jobs} jobs, {happened.total()} events ({kinds}), {steps} steps, {seconds:.0f} s")


if __name__ == "__main__":
    run(sys.argv[1:])
