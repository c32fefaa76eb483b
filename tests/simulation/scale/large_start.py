"""How a job of thousands of ranks meets, in a world: a launcher, agents, and workers.

The launcher runs the real driver, and what packs its messages. Rank 0 runs the real `connect` on
the thread of a process of the world; sockets are left out. Other ranks say what they would say, and
do not read what all are told alike. A message takes a latency, and its bytes the launcher's link.
"""

from __future__ import annotations

import hashlib
import threading
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgpack

from hvdlite.common.connections.frames import pack, unpack
from hvdlite.common.decisions.control_tree import neighbours
from hvdlite.common.membership.frames import World as Members
from hvdlite.common.membership.frames import read_world
from hvdlite.common.membership.link import LinkExchange
from hvdlite.common.plain.config import Config
from hvdlite.common.plain.messages import PROTOCOL_VERSION, installed_version
from hvdlite.common.runtime.elastic_worker import KeptSets
from hvdlite.common.transport.bootstrap import HELLO, MAGIC, Gathering
from hvdlite.common.transport.tcp import connect as tcp
from hvdlite.common.transport.tcp.addresses import Card, Endpoint
from hvdlite.launcher.agents.channel import unsqueeze
from hvdlite.launcher.decisions import commands
from hvdlite.launcher.decisions.commands import ElasticPlan
from hvdlite.launcher.elastic import workers
from hvdlite.launcher.elastic.driver_loop import DriverLoop
from tests.simulation.lines import Wire
from tests.simulation.world import Process, World

LATENCY, LINK_BYTES = 1e-4, 3e9  # Seconds, and bytes a second: 25 Gbit/s.
SSH_SECONDS, IMPORT_SECONDS = 0.3, 2.0  # Until an agent has come, and until a worker is in `init`.
MOST_AT_ONCE = 32  # Agents that are on their way.
ROUNDS = 4  # Of the meeting of workers, which know their hosts.
Deliver = Callable[[bytes], object]


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

    with ExitStack() as stack:
        for owner, name, stand_in in (
            (tcp, "TcpTransport", Transport), (tcp, "Connections", Nothing),
            (tcp, "Liveness", Nothing), (Gathering, "meet", meet),
            (tcp, "_listen", lambda *_: (worker.card(), [])), (tcp, "_machine", lambda: bytes(16)),
        ):  # fmt: skip
            stack.enter_context(patch.object(owner, name, stand_in))
        yield


class Nothing:
    def __init__(self, *_: object) -> None:
        """Nothing is asked of it."""


def _start(rank: int, slot: int, variables: dict[str, str]) -> dict[str, Any]:
    return {"rank": rank, "local_rank": slot, "command": ["train"], "variables": variables}


class Launcher(DriverLoop):
    """The process of the launcher: the driver, with the messages that it reads and packs."""

    def __init__(self, world: World, hosts: dict[str, int]) -> None:
        self.world, self.hosts = world, hosts
        self.seconds = 0.0  # Of CPU.
        self.sent = self.queued = self.most_queued = 0  # Bytes.
        self.agents: dict[str, Agent] = {}
        self.met: Counter[int] = Counter()  # How many have connected, by epoch.
        self.was_lost = False  # Whether a host was lost, and no world has followed.
        self.since = 0.0  # When the last worker has come, or has asked for the next world.
        self._wire = Wire(LINK_BYTES)
        self._inbox: list[bytes] = []
        self._coming: list[str] = []
        self._under_way = 0
        self._due = False
        self._tick_at = 0.0
        self._told: tuple[bytes, list[Any], list[int]] = (b"", [], [])
        loop: Any = SimpleNamespace(look_every=lambda *_: None)
        ranks = sum(hosts.values())
        plan = ElasticPlan(ranks, max(1, ranks // 2), cooldown=(1, 4))
        super().__init__(plan, loop)
        self.driver._uniform = world.lot.random
        nothing = lambda *_: None  # noqa: E731
        options = SimpleNamespace(command=["python", "train.py"], as_horovod=False)
        output = SimpleNamespace(feed=nothing, begin=nothing, end=lambda number: None)
        live = SimpleNamespace(note=nothing, orders=SimpleNamespace(receive=nothing))
        job: Any = SimpleNamespace(options=options, output=output, live=live)
        description: Any = SimpleNamespace(keep_answer=nothing, start=_start)
        self.workers = workers.WorkerProcesses(job, description, self.driver)

    # -- messages

    def carry(self, count: int, action: Callable[[], object]) -> None:
        """Let bytes go out, one message after the other, and `action` happen where they come."""
        self.sent, self.queued = self.sent + count, self.queued + count
        self.most_queued = max(self.most_queued, self.queued)
        left = self._wire.take(self.world.now, count)

        def arrive() -> None:
            self.queued -= count
            action()

        latency = LATENCY * (0.5 + self.world.lot.random())
        self.world.at(left + latency, arrive)

    def arrive(self, message: bytes) -> None:
        """Have a message of an agent after a latency."""
        latency = LATENCY * (0.5 + self.world.lot.random())
        self.world.after(latency, lambda: self._take(lambda: self._said(message)))

    def _said(self, message: bytes) -> None:
        kind, *fields = unpack(message)
        if fields[1][0] != "gather":
            self.since = self.world.now
        self.workers.receive(kind, fields)

    def _take(self, action: Callable[[], object]) -> None:
        """Do something as the loop does: all that has come, and then what was decided."""
        self._run(action)
        if not self._due:
            self._due = True
            self.world.after(1e-4, self._turn)

    def _turn(self) -> None:
        self._due = False
        self._run(self.carry_out)
        due = self.driver.due()
        if due is not None and not self.world.now < self._tick_at <= due:
            self._tick_at = due
            self.world.after(max(0.0, due - self.world.now), lambda: self._tick(due))

    def _tick(self, due: float) -> None:
        if due == self._tick_at:  # Else an earlier one has come between.
            self._tick_at = 0.0
            self._take(lambda: self.driver.tick(self.world.now))

    def _run(self, action: Callable[[], object]) -> None:
        began = time.thread_time()
        with patch.object(workers, "time", SimpleNamespace(monotonic=self.world.clock)):
            action()
        self.seconds += time.thread_time() - began

    def read(self, data: bytes) -> tuple[list[Any], list[int]]:
        """Return a message of the driver, and the members of the last world."""
        if self._told[0] is not data:
            message = unpack(unsqueeze(data))
            members = [each for each, _ in message[2]] if message[0] == "world" else self._told[2]
            self._told = data, message, members
        return self._told[1], self._told[2]

    # -- commands of the driver

    def start_agent(self, host: str) -> None:
        self._coming.append(host)
        self._start_next()

    def _start_next(self) -> None:
        while self._coming and self._under_way < MOST_AT_ONCE:
            self._under_way += 1
            host = self._coming.pop(0)
            after = SSH_SECONDS * (1 + self.world.lot.random())
            self.world.after(after, lambda h=host: self._take(lambda: self._came(h)))  # type: ignore[misc]

    def _came(self, host: str) -> None:
        self._under_way -= 1
        self.agents[host] = Agent(self, host, list(self.hosts).index(host))
        self.driver.agent_came(host, self.world.now)
        self._start_next()

    def drop_agent(self, host: str) -> None:
        raise AssertionError(f"{host} is not dropped")

    def start_worker(self, worker: commands.StartWorker) -> None:
        agent: Any = self.agents[worker.host]
        self.workers.start(worker, agent)

    def signal(self, number: int, signal_number: int) -> None:
        raise AssertionError(f"worker {number} is not ended")

    def tell(self, numbers: tuple[int, ...], frame: list[Any]) -> None:
        self.workers.tell(numbers, frame)

    def say(self, line: str) -> None:
        self.world.tell("launcher", line)

    def look(self, now: float) -> None:
        """Nothing goes without a word."""

    # -- what happens

    def discover(self) -> None:
        self._take(lambda: self.driver.discovered(self.hosts, self.world.now))

    def lose(self, host: str) -> None:
        """Lose a host: its channel closes, and the other ranks hear of it as the launcher does."""
        self.was_lost = True
        lost = self.agents.pop(host)
        lost.lives = False

        def hear() -> None:
            self.workers.forget(lost)  # type: ignore[arg-type]
            self.driver.agent_lost(host, "it has closed its connection", True, self.world.now)

        self.world.after(LATENCY, lambda: self._take(hear))
        for agent in self.agents.values():
            for worker in agent.workers.values():
                after = 1e-3 * (1 + self.world.lot.random())
                self.world.after(after, lambda w=worker, e=worker.epoch: w.leave(e))  # type: ignore[misc]

    def living(self) -> list[Worker]:
        return [each for agent in self.agents.values() for each in agent.workers.values()]
