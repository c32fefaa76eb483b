"""A cluster on this host: scheduler, servers and workers are threads that come and go."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite.common.connections.address import Address
from hvdlite.common.requests.handles import Handle
from hvdlite.ps.cluster.settings import ClusterSettings
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.messages import SCHEDULER, SERVER, WORKER
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.scheduler.scheduler import Scheduler
from hvdlite.ps.server.running import run_server
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowStore
from hvdlite.ps.tables.row_table import AddedRows
from hvdlite.ps.tables.updater import Updater
from hvdlite.ps.worker.remote_table import RemoteTable
from hvdlite.ps.worker.worker import Worker
from tests.limits import patient
from tests.ps.test_tables import Momentum

SIZES = (300, 7, 40)
SPECS = [TensorSpec(str(number), "float64", (size,)) for number, size in enumerate(SIZES)]
LIMIT_SECONDS = patient(30.0)


class Loop:
    """A thread whose end is asked for, and awaited."""

    def __init__(self, body: Callable[[Callable[[], bool]], None]) -> None:
        self.error: BaseException | None = None
        self._ended = threading.Event()
        self._body = body
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._body(self._ended.is_set)
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        self._ended.set()
        self.wait()

    def wait(self) -> None:
        self._thread.join(LIMIT_SECONDS)
        assert not self._thread.is_alive()


class Cluster:
    """Parts of a cluster; times are short, and what a part is started with can be overridden."""

    def __init__(
        self, folder: Path, servers: int, workers: int, *, every: int = 0,
        updater: Callable[[], Updater] = Momentum, tls: bool = False,
        updater_of: Callable[[TableDescription], Updater] | None = None, **words: Any,
    ) -> None:  # fmt: skip
        words = {"independent": True, "worker_seconds": 30.0, "server_seconds": 30.0, **words}
        self._plan = ClusterSettings(SCHEDULER, "", servers, workers, **words)  # Of the scheduler.
        self.folder, self._updater = folder, updater
        self._updater_of = updater_of  # Instead of `updater`.
        self.settings = ClusterSettings(
            WORKER, "127.0.0.1:0", servers, workers, token=b"a secret", independent=True,
            tls=tls, start_seconds=30.0, server_seconds=30.0,
            snapshots=str(folder / "snapshots") if every else "", snapshot_every=every or 1,
        )  # fmt: skip
        self._port = 0
        self.workers: list[Worker] = []
        self.start_scheduler()
        self.servers: list[Loop] = []
        self.stopped: dict[int, threading.Event] = {}  # Is set when the server stands still.
        for number in range(servers):
            self.servers.append(self.start_server(number))
            wait_until(partial(self._is_member, "server", number))

    def _is_member(self, role: str, number: int) -> bool:
        return (role, number) in self.state.membership.members

    def start_scheduler(self) -> None:
        ready = threading.Event()

        def body(ended: Callable[[], bool]) -> None:
            words = self.settings
            listener = Listener(
                Address("127.0.0.1", self._port), SCHEDULER, words.token, encrypted=words.tls,
                carries=False,
            )  # fmt: skip
            self._port = int(listener.address.rpartition(":")[2])
            state = self.folder / "scheduler.json"
            self.state = Scheduler(listener, self._plan, state)
            ready.set()
            self.state.serve(ended)
            listener.close()

        self.scheduler = Loop(body)
        assert ready.wait(LIMIT_SECONDS)
        self.settings = replace(self.settings, scheduler=f"127.0.0.1:{self._port}")

    def start_server(self, number: int, *, joins: bool = False) -> Loop:
        name = f"server {number}"
        settings = replace(self.settings, role=SERVER, node_id=name, joins=joins)

        def new_updater(described: TableDescription) -> Updater:
            if self._updater_of is not None:
                return self._updater_of(described)
            if described.rows is None:
                return self._updater()
            return AddedRows(RowStore(described.name, described.rows.spec))

        def body(ended: Callable[[], bool]) -> None:
            def killed() -> bool:
                while number in self.stopped and not ended():
                    self.stopped[number].set()
                    time.sleep(0.005)
                return ended()

            run_server(settings, new_updater, killed=killed)

        return Loop(body)

    def stop_server(self, number: int) -> None:
        """Let a server do nothing more, as SIGSTOP would, until it is started again."""
        self.stopped[number] = threading.Event()
        assert self.stopped[number].wait(LIMIT_SECONDS)

    def restart_server(self, number: int) -> None:
        self.servers[number].end()
        self.stopped.pop(number, None)
        self.servers[number] = self.start_server(number)

    def worker(self, name: str, number: int | None = None, **words: Any) -> Worker:
        settings = replace(self.settings, node_id=name, **words)
        made = Worker(settings, number=number)
        self.workers.append(made)
        return made

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        for loop in [*self.servers, self.scheduler]:
            loop.end()
            if loop.error is not None:  # A test that fails shows it.
                traceback.print_exception(loop.error)


NewCluster = Callable[..., Cluster]  # What the fixture `new_cluster` is.


class Trainer:
    """A worker that trains a table of three tensors on gradients that numpy draws."""

    def __init__(self, worker: Worker, mode: str = SYNC, staleness: int | None = None) -> None:
        self.worker = worker
        self.values: list[Array] = [np.arange(size, dtype=float) for size in SIZES]
        options = TableOptions(mode, staleness, part_bytes=800)
        self.table: RemoteTable = worker.declare("t", SPECS, options, lambda: self.values)
        self.table.pull(self.values)

    def train(self, until: int) -> None:
        while self.table.clock < until:
            self.push()
            self.table.pull(self.values)

    def push_ones(self) -> None:
        self.table.push([np.ones(size) for size in SIZES], {})

    def push(self) -> Handle:
        step = self.table.clock + self.table.steps_before
        return self.table.push(gradients_of(step, self.worker.number), {})


def trainers(cluster: Cluster, count: int, *mode: Any) -> list[Trainer]:
    """Return workers that take part; they come at the same time."""

    def enter(number: int) -> Callable[[], Trainer]:
        return lambda: Trainer(cluster.worker(f"worker {number}", number), *mode)

    return in_threads(*[enter(number) for number in range(count)])


def with_one(
    new_cluster: NewCluster, servers: int, steps: int = 0, *mode: Any, **words: Any
) -> tuple[Cluster, Trainer]:
    """Return a cluster with one worker, which has made these steps."""
    cluster = new_cluster(servers, 1, **words)
    (trainer,) = trainers(cluster, 1, *mode)
    trainer.train(steps)
    return cluster, trainer


def with_two(
    new_cluster: NewCluster, servers: int, steps: int = 0, *mode: Any, **words: Any
) -> tuple[Cluster, Trainer, Trainer]:
    """Return a cluster with two workers, which have made these steps."""
    cluster = new_cluster(servers, 2, **words)
    first, second = trainers(cluster, 2, *mode)
    in_threads(lambda: first.train(steps), lambda: second.train(steps))
    return cluster, first, second


def gradients_of(step: int, worker: int) -> list[Array]:
    made = np.random.default_rng([step, worker])
    return [made.normal(size=size) for size in SIZES]


def train_in_one(
    steps: int, workers: Callable[[int], Sequence[int]], updater: Callable[[], Updater] = Momentum
) -> list[bytes]:
    """Return what numpy makes of the gradients of `workers(step)`, added up in their order."""
    alone = updater()
    alone.begin([np.arange(size, dtype=float) for size in SIZES])
    for step in range(steps):
        terms = [gradients_of(step, worker) for worker in workers(step)]
        total = [sum(parts[1:], parts[0]) * (1 / len(parts)) for parts in zip(*terms, strict=True)]
        alone.step(total, [])
    return bits(alone.values())


def bits(values: Sequence[Array]) -> list[bytes]:
    return [array.tobytes() for array in values]


def in_threads(*mains: Callable[[], Any]) -> list[Any]:
    """Run functions at the same time; return what they return, or raise the first error."""
    results: list[Any] = [None] * len(mains)
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            results[number] = mains[number]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(n,), daemon=True) for n in range(len(mains))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "something hangs"
    return results


def wait_until(holds: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit, "it did not come true"
        time.sleep(0.005)
