"""Servers and workers over sockets, as threads: modes and losses, against numpy."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.connections.address import Address
from hvdlite.common.requests.handles import Handle
from hvdlite.ps.connections.channel import Listener
from hvdlite.ps.connections.client import Client
from hvdlite.ps.connections.messages import SERVER, Message
from hvdlite.ps.layouts.blocks import Array, Block, TensorSpec, blocks_of
from hvdlite.ps.layouts.layout import Part, place
from hvdlite.ps.server import server as server_module
from hvdlite.ps.server.server import Server
from hvdlite.ps.server.snapshots import SnapshotFolder
from hvdlite.ps.tables.clocks import ASYNC, SSP, SYNC, Clocks, Mode
from hvdlite.ps.tables.description import TableDescription, describe_table
from hvdlite.ps.tables.saved import SavedTable
from hvdlite.ps.tables.table import Saved
from hvdlite.ps.worker.shard import Shard
from tests.ps.test_tables import Momentum

SIZES = (300, 7, 40)
SPECS = [TensorSpec(str(number), "float64", (size,)) for number, size in enumerate(SIZES)]
LAYOUT = place(SIZES, [8] * 3, 2, part_bytes=800)


class RunningServer:
    """A server in a thread, at a socket of this host; it may end and come again."""

    every = 0  # Snapshots are made each so many versions; 0: never.

    def __init__(self, number: int, folder: Path, workers: Sequence[int]) -> None:
        self._port = 0
        self.number, self.folder = number, folder
        self.workers = workers
        self.incarnation = 0
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self._ended = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self) -> None:
        listener = Listener(Address("127.0.0.1", self._port), SERVER)
        self.address = listener.address
        self._port = int(self.address.rpartition(":")[2])
        snapshots = SnapshotFolder(self.folder, self.number) if self.every else None
        self.server = Server(
            listener, self._updater, incarnation=self.incarnation, workers=self.workers,
            snapshots=snapshots, snapshot_every=self.every,
        )  # fmt: skip
        self._ready.set()
        self.server.serve(self._ended.is_set)
        listener.close()
        if snapshots is not None:
            snapshots.close()

    def _updater(self, _described: Any) -> Momentum:
        return Momentum()

    def end(self) -> None:
        self._ended.set()
        self._thread.join(10)


class Trainer:
    """A worker."""

    def __init__(self, number: int, servers: Sequence[RunningServer], mode: Mode) -> None:
        self.number = number
        self.client = Client(b"w%d" % number)
        self.values = [np.arange(size, dtype=float) for size in SIZES]
        self.blocks = [blocks_of(SPECS, 0, LAYOUT, server) for server in range(len(servers))]
        self.shards = []
        for server, running in enumerate(servers):
            connection = self.client.connect(running.address, SERVER)
            described = describe_table(SPECS, self.blocks[server], mode, average=True)
            shard = Shard(
                "t", server, number, described, lambda server=server: self.cut(self.values, server),
                connection.send,
            )  # fmt: skip
            connection.receive = shard.receive
            self.shards.append(shard)
        self.wait([self.ask(shard.start) for shard in self.shards])
        self.step = self.shards[0].clock
        for shard in self.shards:
            shard.stand_at(self.step)

    def ask(self, call: Any, *words: Any) -> Handle:
        return self.client.ask(lambda done: call(*words, done))

    def wait(self, handles: Sequence[Handle]) -> list[Message]:
        for handle in handles:
            assert handle.ended_within(30)
        return [handle.wait() for handle in handles]

    def cut(self, tensors: Sequence[Array], server: int) -> list[bytes]:
        found = []
        for block in self.blocks[server]:
            block.gather(tensors, 0, array := block.new())
            found.append(array.tobytes())
        return found

    def train(self, steps: int) -> None:
        for _ in range(steps):
            gradients = gradients_of(self.step, self.number)
            for server, shard in enumerate(self.shards):
                self.ask(shard.push, {}, self.cut(gradients, server))
            self.pull()
            self.step += 1

    def pull(self) -> None:
        answers = self.wait([self.ask(shard.pull) for shard in self.shards])
        for blocks, answer in zip(self.blocks, answers, strict=True):
            for block, data in zip(blocks, answer.payloads, strict=True):
                block.scatter(block.view(data), self.values, 0)


def gradients_of(step: int, worker: int) -> list[Array]:
    made = np.random.default_rng([step, worker])
    return [made.normal(size=size) for size in SIZES]


def train_in_one(steps: int, workers: Sequence[int]) -> list[Array]:
    alone = Momentum()
    alone.begin([np.arange(size, dtype=float) for size in SIZES])
    for step in range(steps):
        terms = [gradients_of(step, worker) for worker in workers]
        total = [sum(parts[1:], parts[0]) * (1 / len(parts)) for parts in zip(*terms, strict=True)]
        alone.step(total, [])
    return alone.values()


@pytest.fixture
def servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[RunningServer]]:
    monkeypatch.setattr(server_module, "LOOK_SECONDS", 0.02)
    made = [RunningServer(number, tmp_path, range(2)) for number in range(2)]
    yield made
    for server in made:
        server.end()


def in_threads(count: int, main: Any) -> None:
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            main(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=body, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_sync_is_bitwise_one_process(servers: list[RunningServer]) -> None:
    def main(number: int) -> None:
        worker = Trainer(number, servers, Mode(SYNC))
        worker.train(20)
        worker.client.close()
        wanted = train_in_one(20, range(2))
        assert [a.tobytes() for a in worker.values] == [a.tobytes() for a in wanted]

    in_threads(2, main)


def test_async_does_not_wait_for_a_slow_worker(servers: list[RunningServer]) -> None:
    both, done = threading.Barrier(2), threading.Event()

    def main(number: int) -> None:
        worker = Trainer(number, servers, Mode(ASYNC))
        both.wait(20)
        if number:
            assert done.wait(20)
        worker.train(20)
        done.set()
        worker.client.close()

    in_threads(2, main)
    assert all(server.server.tables["t"].version == 40 for server in servers)


@pytest.mark.parametrize("staleness", [0, 2, 8])
def test_workers_are_as_far_apart_as_the_staleness_allows_and_no_further(
    servers: list[RunningServer], staleness: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, finished = [0], [0, 0]
    push = Clocks.push

    def noted(self: Clocks, worker: int, clock: int) -> bool:
        found = push(self, worker, clock)
        seen.append(max(self.finished.values()) - min(self.finished.values()))
        return found

    monkeypatch.setattr(Clocks, "push", noted)
    both, limit = threading.Barrier(2), time.monotonic() + 30

    def main(number: int) -> None:
        worker = Trainer(number, servers, Mode(SSP, staleness))
        both.wait(20)
        for step in range(20):
            while number and finished[0] < min(20, step + staleness) and time.monotonic() < limit:
                time.sleep(0.001)  # The slow one: the other goes as far as it may.
            worker.train(1)
            finished[number] += 1
        worker.client.close()

    in_threads(2, main)
    assert max(seen) == staleness + 1


@pytest.mark.parametrize("every", [0, 1, 3])
def test_a_server_is_lost_and_returns(
    tmp_path: Path, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With each version saved, the run is bitwise an undisturbed one."""
    monkeypatch.setattr(RunningServer, "every", every)
    servers = [RunningServer(number, tmp_path, range(2)) for number in range(2)]
    turn = threading.Barrier(3)
    trained = []

    def main(number: int) -> None:
        if number == 2:
            for _ in range(3):
                turn.wait(20)
                servers[0].end()  # in the middle of a step
                servers[0].start()
            return
        worker = Trainer(number, servers, Mode(SYNC))
        for _ in range(3):
            worker.train(7)
            turn.wait(20)
        worker.train(7)
        worker.client.close()
        trained.append(worker)

    in_threads(3, main)
    for server in servers:
        server.end()
    assert [shard.version for worker in trained for shard in worker.shards] == [28] * 4
    first, second = ([a.tobytes() for a in worker.values] for worker in trained)
    assert first == second
    if every == 1:
        assert first == [a.tobytes() for a in train_in_one(28, range(2))]


def test_a_damaged_snapshot_is_named(tmp_path: Path) -> None:
    folder = SnapshotFolder(tmp_path, 3)
    block = Block("float64", 0, (Part(0, 0, 4, 0),))
    about = TableDescription("a/b", describe_table([], [block], Mode(SYNC), average=True))
    state = {"0.m": np.ones(2, np.float32)}
    folder.write(SavedTable(about, Saved([np.arange(4.0)], state, 7, {0: 7}, [])))
    (read,) = SnapshotFolder(tmp_path, 3).newest()
    saved = read.saved
    assert (read.described.name, saved.version, saved.finished) == ("a/b", 7, {0: 7})
    assert saved.values[0].tolist() == [0, 1, 2, 3] and saved.state["0.m"].dtype == np.float32
    (path,) = tmp_path.glob("server-3/*/*.safetensors")
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(
        HorovodInternalError, match=r"000007\.safetensors of server 3 cannot be read"
    ):
        folder.newest()
