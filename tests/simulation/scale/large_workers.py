"""The agents and workers of a job of thousands of ranks that meets, in a world.

Rank 0 runs the real `connect` on the thread of a process of the world; sockets are left out. Other
ranks say what they would say, and do not read what all are told alike.
"""

from __future__ import annotations

import hashlib
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgpack

from hvdlite.common.connections.frames import pack, unpack
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.driver_link.frames import World as Members
from hvdlite.common.driver_link.frames import read_world
from hvdlite.common.driver_link.link import LinkExchange
from hvdlite.common.requests.messages import PROTOCOL_VERSION, installed_version
from hvdlite.common.runtime.elastic_worker import KeptSets
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.bootstrap import HELLO, MAGIC, Gathering
from hvdlite.common.transport.tcp import connect as tcp
from hvdlite.common.transport.tcp.addresses import Card, Endpoint
from hvdlite.launcher.agents.channel import unsqueeze
from tests.simulation.world import Process, in_place

if TYPE_CHECKING:
    from tests.simulation.scale.large_start import Launcher

IMPORT_SECONDS = 2.0  # Until a worker is in `init`.
ROUNDS = 4  # Of the meeting of workers, which know their hosts.


class Agent:
    """An agent, as the launcher has it, and its workers by number."""

    def __init__(self, launcher: Launcher, host: str, index: int) -> None:
        self.launcher, self.host, self.index = launcher, host, index
        self.lives = True
        self.workers: dict[int, Worker] = {}

    # -- what the launcher calls

    def send(self, kind: str, *fields: Any) -> None:
        head = pack((kind, *fields))
        self.launcher.carry(len(head), lambda: self._hear(unpack(head)))

    def send_data(self, kind: str, *fields: Any, data: bytes) -> None:
        head = pack((kind, *fields))
        self.launcher.carry(len(head) + len(data), lambda: self._hear([*unpack(head), data]))

    # -- on its host

    def _hear(self, message: list[Any]) -> None:
        match message:
            case ["start", int(number), dict(start)] if self.lives:
                worker = Worker(self, number, start["local_rank"])
                self.workers[number] = worker
                world = self.launcher.world
                world.after(IMPORT_SECONDS * (1 + world.lot.random() / 2), worker.greet)
            case ["tell", [*numbers], bytes(data)] if self.lives:
                for number in numbers:
                    self.workers[number].hear(data)

    def say(self, number: int, *message: Any) -> None:
        """Pass on what a worker says."""
        if self.lives:
            self.launcher.arrive(pack(("said", number, list(message))))


class Worker:
    """A worker that is rank 0, or says what every rank says."""

    def __init__(self, agent: Agent, number: int, slot: int) -> None:
        self.agent, self.number, self.slot = agent, number, slot
        self.world = agent.launcher.world
        self.epoch = self.left = self.commit = 0
        self.rank_0: RankZero | None = None

    def greet(self) -> None:
        self.agent.say(self.number, "hello", self.number)

    def leave(self, epoch: int) -> None:
        """Have lost a peer, or come to the check that interrupts."""
        if self.epoch == epoch > self.left:
            self.left = epoch
            self.agent.say(self.number, "ready", self.epoch, self.commit)

    def hear(self, data: bytes) -> None:
        # What all are told is read once: its content is the same for all.
        message, members = self.agent.launcher.read(data)
        match message:
            case ["world", int(epoch), *_]:
                self.epoch, self.rank_0 = epoch, None
                if members[0] == self.number:
                    self.rank_0 = RankZero(self, data)
                self._give(0)
            case ["bodies", int(epoch), int(number), _] if epoch == self.epoch:
                if self.rank_0 is not None:
                    self.rank_0.hear(data)
                if number + 1 < ROUNDS:
                    self._give(number + 1)
                else:
                    self.agent.launcher.met[epoch] += 1
            case ["regroup", int(epoch), *_]:
                self._soon(lambda: self.leave(epoch))
            case ["newcomer", *_]:
                self._soon(lambda: self.agent.say(self.number, "ready", 0, 0))
            case ["notice", int(counter), _]:
                self.agent.say(self.number, "checks", counter, 0)
            case ["raise", *_]:
                self._soon(lambda e=self.epoch: self.leave(e))  # type: ignore[misc]

    def _give(self, number: int) -> None:
        if self.rank_0 is None:
            body = self._body(number)
            self._soon(lambda: self.agent.say(self.number, "gather", self.epoch, number, body))

    def _soon(self, action: Callable[[], object]) -> None:
        self.world.after(1e-3 * (1 + self.world.lot.random()), action)

    def _body(self, number: int) -> bytes:
        """Return what this rank gives to a round of `tcp.connect`."""
        if number == 0:
            invitation = b"" if self.slot else self._random(16) + b"/tmp/hvdlite-abcdefgh/12345678"
            packed: bytes = msgpack.packb([KeptSets().pack(), invitation])
            return HELLO.pack(MAGIC, PROTOCOL_VERSION, installed_version().encode()) + packed
        if number == 1:
            return b"1" + hashlib.sha256(self.agent.host.encode()).digest()[: tcp.MACHINE_BYTES]
        return self.card().pack() if number == 2 else b""

    def card(self) -> Card:
        address = f"10.{self.agent.index >> 8}.{self.agent.index & 255}.1"
        endpoint = Endpoint(address, 8, 32768 + int.from_bytes(self._random(2), "big") % 28000)
        card = Card.new(self._random(5), [endpoint], 1, "")
        return card._replace(host=self.agent.host)

    def _random(self, count: int) -> bytes:
        return self.world.lot.randbytes(count)


class RankZero:
    """Rank 0 of a world, as it connects: in a thread, with what it is told as bytes."""

    def __init__(self, worker: Worker, told: bytes) -> None:
        self.seconds = 0.0  # Of CPU.
        self.connected = False
        self.epoch = worker.epoch
        self.told = [unsqueeze(told)]
        self._worker = worker
        self._process: Process = worker.world.process("rank 0")
        thread = threading.Thread(target=self._run, daemon=True)
        worker.world.after(1e-3, lambda: self._process.begin(thread.start))

    def hear(self, data: bytes) -> None:
        self.told.append(unsqueeze(data))
        self._process.poke()

    def _run(self) -> None:
        began = time.thread_time()
        world = read_world(unpack(self.told[0]), self._worker.number)
        connect(world, self._gather, self._worker)
        self.seconds, self.connected = time.thread_time() - began, True
        self._process.end()

    def _gather(self, epoch: int, number: int, body: bytes) -> list[bytes]:
        self._worker.agent.say(self._worker.number, "gather", epoch, number, body)
        self._process.sleep_until(lambda: len(self.told) > number + 1)
        return self.bodies(number)

    def bodies(self, number: int) -> list[bytes]:
        found: list[bytes] = unpack(self.told[number + 1])[3]
        return found

    def bytes_of_memory(self) -> int:
        """Return the most that rank 0 holds while it connects, beside what it is told."""
        world = read_world(unpack(self.told[0]), self._worker.number)
        tracemalloc.start()
        connect(world, lambda epoch, number, body: self.bodies(number), self._worker)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak


def connect(
    world: Members, gather: Callable[[int, int, bytes], list[bytes]], worker: Worker
) -> None:
    """Do as a worker of an elastic job does, but for sockets."""
    sets, agreed = KeptSets(), list[tuple[int, ...]]()
    known = tcp.Known(
        [host for _, host in world.members],
        sets.pack(),
        lambda told: agreed.extend(sets.agree(told, world)),
    )
    with without_sockets(worker):
        tcp.connect(
            LinkExchange(world, gather), Config(), time.monotonic() + 600, neighbours,
            host=world.host, epoch=world.epoch, known=known,
        )  # fmt: skip


@contextmanager
def without_sockets(worker: Worker) -> Iterator[None]:
    """Let `tcp.connect` make no connection."""

    class Mesh:
        poller = None

        def close(self) -> None:
            """Nothing is open."""

    class Transport:
        unreachable: dict[int, Exception] = {}  # noqa: RUF012

        def __init__(self, *_: object) -> None:
            self.control = SimpleNamespace(
                expect=lambda rank: SimpleNamespace(rank=rank, connected=True)
            )

        def close(self) -> None:
            """Nothing is open."""

    def meet(gathering: Any, *_: object) -> None:
        gathering._mesh = Mesh()

    stand_ins: list[tuple[Any, str, Any]] = [
        (tcp, "TcpTransport", Transport), (tcp, "Connections", Nothing),
        (tcp, "Liveness", Nothing), (Gathering, "meet", meet),
        (tcp, "_listen", lambda *_: (worker.card(), [])), (tcp, "_machine", lambda: bytes(16)),
    ]  # fmt: skip
    with in_place(stand_ins):
        yield


class Nothing:
    def __init__(self, *_: object) -> None:
        """Nothing is asked of it."""
