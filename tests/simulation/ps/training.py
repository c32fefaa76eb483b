"""What the workers of a simulated parameter server do, and what they must find."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.messages import SERVER, WORKER, Message
from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.scheduler.checkpoint_order import LOAD
from hvdlite.ps.tables.clocks import SSP, SYNC
from hvdlite.ps.worker import checkpoints
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.shard import PsRolledBack
from hvdlite.ps.worker.table_shards import TableShards, step_together
from hvdlite.ps.worker.worker import Worker
from tests.simulation.ps.nodes import Node, here
from tests.simulation.ps.oracle import (
    ALL_ROWS,
    ROWS,
    SPECS,
    Oracle,
    first_values,
    gradients_of,
    ids_of,
    loaded,
    rows_of,
    whole_rows,
)
from tests.simulation.ps.programs import PsProgram
from tests.simulation.world import BrokenError, World

RESULTS, PROGRESS, STALENESS, ENDS, LEFT = (
    "every push is applied exactly once",
    "nobody waits for what can never come",
    "the fastest worker is not too far ahead",
    "the job ends by the rules",
    "no process, file or descriptor is left",
)


MEETING_SECONDS = 5.0  # After which a worker that waits for others looks whether they can come.


class Training:
    """The scripts of the workers of a job."""

    program: PsProgram
    folder: Path
    world: World
    progress: float
    begun: dict[int, int]  # Pushes, by worker.
    done: set[int]  # Workers that have made all steps.
    leaves: bool
    has_saved: bool  # Worker 0, what all are to go back to.
    nodes: dict[str, Node]
    _killed: dict[str, float]
    _asked: set[object]
    _oracle: Oracle

    def train(self, settings: ClusterSettings, number: int) -> None:
        program, lot = self.program, random.Random(self.program.seed * 100 + number)
        worker = Worker(settings, number=number)
        values = first_values()
        table = worker.declare("t", SPECS, program.options, lambda: values)
        rows: RemoteRows | None = None
        if program.rows:
            rows = worker.declare_rows(ALL_ROWS, program.options._replace(rows=ROWS.fields))
            step_together([rows, table])
        if program.follows is not None:
            checkpoints.load(worker, self.folder / "saved")
        if program.back is not None and table.clock > program.back[1]:
            self._load(worker, table)
        while True:
            try:
                if rows is not None:
                    self._check_rows(worker, rows)
                table.pull(values)
                if self._is_to_load(worker, table) and self._load(worker, table):
                    continue
                step = self._step_of(table)
                self._check_pull(number, step, values)
                if number == 0:
                    self._ask(worker, step)
                if step >= program.steps:
                    self.world.tell(f"{WORKER} {number}", "has made all steps")
                    self._meet(worker, table)
                    break
                self._push(number, table, rows, step)
                here.task.sleep_until(lambda: False, program.pause * lot.random())
            except PsRolledBack as error:
                table.forget_rollback()
                self.world.tell(f"{WORKER} {number}", f"goes back to step {error.version}")
                before = 0 if program.back else table.steps_before
                if not program.loses and not self._has_lost_push(number, error.version + before):
                    raise BrokenError(RESULTS, f"{WORKER} {number} goes back: {error}") from error
        table.pull(values)
        self._check_result(worker, table, values)
        if rows is not None and not program.loses:
            found = rows.pull(range(ROWS.count)).wait()
            right = self._result_of(worker, rows, [self._oracle.rows[-1]])
            self._compare(f"{WORKER} {number}, its rows", [found], right)
        self.leaves = True
        worker.leave()

    def _push(self, number: int, table: RemoteTable, rows: RemoteRows | None, step: int) -> None:
        made = step if self.program.back is None else table.clock
        self.begun[number] = max(self.begun[number], made + 1)
        pushed = table.push(gradients_of(step, number), {})
        if self.program.back is not None or rows is not None:  # Only then is the next step known.
            pushed.wait()
        if rows is not None:
            rows.push(*rows_of(step, number)).wait()

    def _step_of(self, table: TableShards) -> int:
        """Return the next step; but of sync, workers go on where they are when all go back."""
        repeats = self.program.back is None or self.program.mode == SYNC
        return table.clock + (table.steps_before if repeats else 0)

    def _is_to_load(self, worker: Worker, table: TableShards) -> bool:
        """Return whether all go back at this step; others may have done so."""
        back = self.program.back
        return back is not None and table.clock == back[1] and not worker.loads

    def _check_rows(self, worker: Worker, rows: RemoteRows) -> None:
        step = self._step_of(rows)
        ids = ids_of(step, worker.number)
        found = rows.pull(ids).wait()
        exact = self.program.mode == SYNC and not self.program.loses
        if exact and not self._is_to_load(worker, rows):
            wanted = self._oracle.rows[step][ids]
            self._compare(f"{WORKER} {worker.number}, rows of step {step}", [found], [wanted])

    def _has_lost_push(self, number: int, version: int) -> bool:
        """Return whether the last push of a worker that was lost may have gone with a server.

        It was no part of an update yet, and nobody is left who could send it again.
        """
        lost = self._killed.get(f"{WORKER} {number}")
        servers = [at for name, at in self._killed.items() if name.startswith(SERVER)]
        again = lost is not None and max(servers, default=0.0) > lost
        return again and version >= self.begun[number] - 1

    def _load(self, worker: Worker, table: RemoteTable) -> bool:
        """Go back to what worker 0 has saved, unless others have done so; return whether it is."""
        assert self.program.back is not None
        if not self.has_saved:  # A disk was full, or a step was to be made again.
            return False
        # A worker that has come again when others had made steps may be the one that leads.
        for each in worker.named.values():
            each.entered_at = each.entered_at if each.clock > self.program.back[1] else 0
        self.world.tell(f"{WORKER} {worker.number}", f"loads before step {table.clock}")
        checkpoints.load(worker, self.folder / "back")
        self.world.tell(f"{WORKER} {worker.number}", f"goes on from {table.steps_before}")
        return worker.loads > 0  # A worker that comes late may be alone in it.

    def _ask(self, worker: Worker, step: int) -> None:
        """Do what one worker does before a step: save, and let there be fewer servers."""
        back = self.program.back
        if back is not None and back[0] == step and not worker.loads and not self.has_saved:
            try:
                checkpoints.save(worker, self.folder / "back")
                self.has_saved = True
            except (OSError, ValueError) as error:
                self.world.tell(f"{WORKER} 0", f"cannot save: {error}")
        if step in self.program.saves and step not in self._asked:
            self.world.tell(f"{WORKER} 0", f"saves before step {step}")
            self._asked.add(step)
            try:
                checkpoints.save(worker, self.folder / "saved")
            except OSError as error:  # A disk is full.
                self.world.tell(f"{WORKER} 0", f"cannot save: {error.strerror}")
        for scale in self.program.scales:
            if scale[0] == step and scale not in self._asked:
                self._asked.add(scale)
                self.world.tell(f"{WORKER} 0", f"wants {scale[1]} servers")
                try:
                    worker.scale_servers(scale[1])
                except HorovodInternalError as error:
                    if not error.job_goes_on:
                        raise
                    self.world.tell(f"{WORKER} 0", f"is refused: {error}")

    def _meet(self, worker: Worker, table: RemoteTable) -> None:
        """Wait until all workers have made their steps, without a word to the servers.

        Raises `PsRolledBack` where some of the steps are to be made again.
        """
        self.done.add(worker.number)
        for node in self.nodes.values():
            for each in node.tasks:
                each.poke()
        # Where the cluster has failed, nobody else tells this thread.
        while len(self.done) < self.program.workers and not worker.failure:
            here.task.sleep_until(lambda: len(self.done) == self.program.workers, MEETING_SECONDS)
            try:
                table.raise_if_rolled_back()
            except PsRolledBack:
                self.done.discard(worker.number)
                raise

    def _check_pull(self, number: int, clock: int, values: Sequence[Array]) -> None:
        self.progress = self.world.now
        program = self.program
        if program.mode == SYNC and not program.loses:
            wanted = self._oracle.versions[clock]
            self._compare(f"{WORKER} {number}, step {clock}", values, wanted)
        if program.mode == SSP and not program.loses and program.staleness is not None:
            slowest = min(self.begun.values())
            if slowest < clock - program.staleness:
                text = f"{WORKER} {number} begins step {clock}, and others are at {self.begun}"
                raise BrokenError(STALENESS, text)

    def _check_result(self, worker: Worker, table: RemoteTable, values: Sequence[Array]) -> None:
        program = self.program
        # What was loaded may be lost with a server before a worker has pulled it.
        has_loaded = program.follows is not None and not program.every
        exact = program.mode == SYNC and not program.momentum and not has_loaded
        if exact or not program.loses:
            wanted = self._result_of(worker, table, self._oracle.versions[program.steps])
            self._compare(f"{WORKER} {worker.number}, the result", values, wanted)

    def _result_of(
        self, worker: Worker, table: TableShards, whole: Sequence[Array]
    ) -> Sequence[Array]:
        """Return what all steps make, or what was loaded with all pushes of after the load."""
        if self.program.back is None or self.program.mode == SYNC:
            return whole
        asked = Message("turn", body={"what": LOAD, "number": 0, "late": True})
        answer = worker.ask(asked).body
        if not answer["loads"]:
            return whole
        saved, steps = loaded(self.folder / "back", table.name)
        _, of_workers = answer["steps"][table.name]
        for number, before in of_workers:
            for step in range(steps - before, self.program.steps):
                is_rows = isinstance(table, RemoteRows)
                pushed = [whole_rows(step, number)] if is_rows else gradients_of(step, number)
                saved = [a + b for a, b in zip(saved, pushed, strict=True)]
        return saved

    def _compare(self, where: str, values: Sequence[Array], wanted: Sequence[Array]) -> None:
        for found, right in zip(values, wanted, strict=True):
            if not np.array_equal(found, right):
                raise BrokenError(RESULTS, f"{where}: {found.tolist()} instead of {right.tolist()}")
