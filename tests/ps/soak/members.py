"""What each process of a soak's job is: the steps of workers, and what they do in between.

A life of a job begins with a load, and has three phases. Between the first two, worker 0 saves;
between the last two, all workers load that, so that the steps of the second phase count no more.
Workers that join make steps within one phase, and leave.
"""

from __future__ import annotations

import builtins
import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hvdlite.ps import context as ps
from tests.ps.soak.training import TRAININGS, Plan, Training

PHASES = 3
SAVE_EVERY = 9  # Steps of worker 0.
SLOW_SECONDS, LOOK_SECONDS = 0.01, 0.01


def main(folder: Path, life: int, plan: Plan) -> None:
    """Be a member of a job, in whatever role."""
    let_disk_be_full(folder)
    torch.set_num_threads(1)
    worker = int(os.environ["HVDLITE_NODE_ID"].lstrip("abcdefghijklmnopqrstuvwxyz"))
    if phase := os.environ.get("SOAK_PHASE"):  # In sync all wait for a worker that has come.
        wait_for((folder / f"has-begun-{life}-{phase}").exists)
    ps.init()
    if ps.role() == "worker":
        (folder / f"begun-{life}-{worker}").touch()
    training = TRAININGS[plan.framework](plan)
    member = Member(folder, life, worker, plan, training)
    if worker < plan.workers:
        member.live()
    else:
        member.visit(int(os.environ["SOAK_PHASE"]))
    ps.shutdown()


def let_disk_be_full(folder: Path) -> None:
    """Let no table and no state be written while there is a file `full`."""
    really_open = builtins.open

    def open_(file: Any, mode: str = "r", *words: Any, **more: Any) -> Any:
        if str(file).endswith(".unfinished") and (folder / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return really_open(file, mode, *words, **more)

    builtins.open = open_  # type: ignore[assignment]


def put(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all."""
    path.with_suffix(f".{os.getpid()}").write_text(text)
    path.with_suffix(f".{os.getpid()}").rename(path)


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
        time.sleep(LOOK_SECONDS)


class Member:
    """A worker. What it does is written down, so that it goes on when it was killed."""

    def __init__(
        self, folder: Path, life: int, worker: int, plan: Plan, training: Training
    ) -> None:
        self._folder, self._life, self._worker = folder, life, worker
        self._plan, self._training = plan, training

    def _file(self, kind: str, *words: object) -> Path:
        return self._folder / "-".join(map(str, (kind, self._life, *words)))

    def live(self) -> None:
        """Be there from the beginning to the end."""
        if not self._life:
            self._save_for_all("first")
        self._load(1, self._folder / "saved" if self._life else self._file("first"))
        self._make_steps(0)
        self._save_for_all("middle")
        self._make_steps(1)
        self._load(2, self._file("middle"))
        self._make_steps(2)
        ps.barrier()
        found = self._file("found", self._worker)
        with open(found.with_suffix(f".{os.getpid()}"), "wb") as file:
            np.save(file, self._training.found())
        found.with_suffix(f".{os.getpid()}").rename(found)
        if self._worker == 0:
            save(self._folder / "saved")
        ps.barrier()

    def _save_for_all(self, name: str) -> None:
        """Save as worker 0, once; as any other, wait for it."""
        done = self._file(f"has-saved-{name}")
        if self._worker == 0 and not done.exists():
            save(self._file(name))
            done.touch()
        wait_for(done.exists)

    def _load(self, loads: int, folder: Path) -> None:
        """Let the servers have loaded so many times; a worker that returns may be late."""
        while ps.worker().loads < loads:
            ps.load(folder)

    def _make_steps(self, phase: int) -> None:
        """Make the steps of a phase, which is over when each worker has said how many it has."""
        self._file("has-begun", phase).touch()  # All before is saved, or was loaded.
        ends = [self._file("steps", phase, n) for n in range(self._plan.workers)]
        if not (own := ends[self._worker]).exists():
            self._step_while(lambda step: self._goes_on(phase, step))
            put(own, str(self._step))
        wait_for(lambda: all(end.exists() for end in ends))

    @property
    def _step(self) -> int:
        return min(table.clock for table in self._training.tables)

    def _step_while(self, holds: Callable[[int], bool]) -> None:
        while True:
            tables = self._training.tables
            clocks = {table.clock for table in tables}
            whole = len(clocks) == 1 and not any(table.is_half_pushed for table in tables)
            if whole and not holds(min(clocks)):
                return
            self._training.step(self._life, min(clocks), self._worker)

    def _goes_on(self, phase: int, step: int) -> bool:
        """Return whether a step belongs to the phase; as worker 0, do what is asked meanwhile."""
        hurries = self._file("hurry", phase).exists()
        if hurries and self._plan.apart is None:
            return False
        end = self._file("end", phase)
        if self._worker == 0:
            if hurries and not end.exists():
                assert self._plan.apart is not None
                put(end, str(step + self._plan.apart + 2))
            self._obey(step)
        if not hurries:
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

    def visit(self, phase: int) -> None:
        """Join, make steps until it is time to go, and leave."""
        name = phase, self._worker
        begin, end = self._file("visitor", *name), self._file("gone", *name)
        if not begin.exists():
            put(begin, " ".join(str(table.clock) for table in self._training.tables))
        if not end.exists():
            go = [self._file("go", self._worker), self._file("go-all", phase)]
            self._step_while(lambda _: not any(each.exists() for each in go))
            put(end, str(self._step))


def wait_for(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(LOOK_SECONDS)
