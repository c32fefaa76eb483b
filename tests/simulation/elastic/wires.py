"""The connections between workers and agents that prove themselves: the real ones, upon sockets.

The agent's `WorkerServer` is the product's, and so are the dial of a worker, its link, its beats,
and what both ends prove to each other. Others come as well, who do not know the secret of the job.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hvdlite.common.connections import link as links
from hvdlite.common.connections import prove
from hvdlite.common.connections.address import Target
from hvdlite.common.connections.dial import Dial, Failure, Limits, Refused
from hvdlite.common.connections.link import Arrays, Link
from hvdlite.common.connections.loop import READ, Handler, Timer
from hvdlite.common.connections.prove import Claim, Party
from hvdlite.common.driver_link import frames
from hvdlite.common.driver_link.server import WorkerServer
from hvdlite.common.meeting.wire import FRAME_BYTES
from tests.simulation.lines import NO_LIMIT
from tests.simulation.start.laws import watched
from tests.simulation.start.net import Host, Net, Node
from tests.simulation.start.programs import Visitor
from tests.simulation.start.sockets import Socket
from tests.simulation.start.visitors import Guest
from tests.simulation.world import Action, World, in_place

if TYPE_CHECKING:
    from tests.simulation.elastic.hosts import AgentProcess
    from tests.simulation.elastic.job import ElasticJob
    from tests.simulation.elastic.workers import Worker

LIMITS = Limits(30.0, 30.0)
PAUSE_SECONDS = 0.05  # Between two dials.
WINDOW, ERROR = 1 << 16, select.EPOLLERR


class Wires(Net):
    """The hosts of a job, and what is between the processes of each."""

    turn: Any  # The process that does something.

    def __init__(self, world: World) -> None:
        super().__init__(world, 0, 0.0, NO_LIMIT, WINDOW)
        self._by_name: dict[str, Host] = {}

    def host(self, name: str) -> Host:
        if name not in self._by_name:
            self._by_name[name] = Host(len(self.hosts), NO_LIMIT)
            self.hosts.append(self._by_name[name])
        return self._by_name[name]

    @contextmanager
    def around(self) -> Iterator[None]:
        """Be what is outside of connections."""
        chance = SimpleNamespace(urandom=self.nonces.randbytes)
        with in_place([(prove, "os", chance), (links, "readable", self._is_readable)]), watched():
            yield

    def _is_readable(self, number: int) -> bool:
        return bool(self.turn.open[number].events() & READ)


class Loop:
    """Has the methods of an `EventLoop`: its handlers are called in events of the world.

    `act` lets a process do something, now or later, or never where it has ended.
    """

    def __init__(self, node: Node, act: Callable[[Action], None]) -> None:
        self._node, self._act = node, act
        self._handlers: dict[int, tuple[int, Handler]] = {}
        self._is_due = False

    @property
    def _net(self) -> Any:
        return self._node.net

    def now(self) -> float:
        return float(self._net.world.clock())

    awake_seconds = now  # Nobody stands still by himself here.

    def new_socket(self, family: int) -> Socket:
        return Socket(self._net, self._node, family).opened()

    def watch(self, number: int, events: int, handler: Handler) -> None:
        self._handlers[number] = events, handler
        self._descriptor(number).epolls[self] = None
        self.poke()

    def forget(self, number: int) -> None:
        if self._handlers.pop(number, None) is not None:
            self._descriptor(number).epolls.pop(self, None)

    def _descriptor(self, number: int) -> Any:
        return self._node.open[number]

    def drop(self, number: int) -> None:
        """Forget what was closed."""
        self._handlers.pop(number, None)

    def poke(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._net.world.after(self._net.world.soon(), partial(self._act, self._run))

    def _run(self) -> None:
        self._is_due = False
        self._net.turn = self._node
        for number, events in self._ready():
            if number in self._handlers:
                self._handlers[number][1](events)
        if self._ready():
            self.poke()

    def _ready(self) -> list[tuple[int, int]]:
        if not self._node.lives:
            return []
        ready = []
        for number, (mask, _) in self._handlers.items():
            if events := self._descriptor(number).events() & (mask | ERROR):
                ready.append((number, events))
        return ready

    def call_at(self, when: float, function: Action) -> Timer:
        timer = Timer(lambda: function() and None)

        def call() -> None:
            if timer.function is not None:
                timer.function()

        self._net.world.at(when, partial(self._act, call))
        return timer

    def call_after(self, seconds: float, function: Action) -> Timer:
        return self.call_at(self._net.world.now + seconds, function)

    def post(self, function: Action) -> None:
        self.call_after(0.0, function)


class Server(WorkerServer):
    """The agent's end of its workers, and what they do at theirs."""

    def __init__(
        self, process: AgentProcess, loop: Loop, path: bytes, secret: bytes, said: Any, ended: Any,
        expects: Any,
    ) -> None:  # fmt: skip
        listening: Any = Socket(process.opened.net, process.opened, socket.AF_UNIX).opened()
        self.path = path
        listening.bind(path)
        listening.listen()
        of_agent: Any = loop
        super().__init__(of_agent, listening, secret, said, ended, expects=expects)
        process.server = self

    def connect(self, worker: Worker) -> None:
        """Let a worker dial."""
        worker.connection = Connection(worker)

    def hear(self, worker: Worker, message: list[Any]) -> None:
        """Let a worker say something."""
        if worker.connection is not None:
            worker.connection.say(message)

    def lose(self, worker: Worker) -> None:
        """Let the system close what a worker has open."""
        if worker.opened is not None:
            worker.opened.end()


class Connection:
    """A worker's end."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._loop: Any = Loop(worker.opened, worker.act)
        self._link: Link | None = None
        self._dial()

    def _dial(self) -> None:
        worker = self._worker
        me = Party(worker.secret, frames.WORKER, frames.DRIVER)
        target = Target(socket.AF_UNIX, worker.home.server.path)
        Dial(self._loop, [target], me, frames.claim(worker.number), self._begin, self._fail, LIMITS)

    def _begin(self, connection: socket.socket, _target: Target) -> None:
        worker = self._worker

        def received(message: Any, _arrays: Arrays) -> None:
            worker.hear(message)

        self._link = Link(
            self._loop, connection, received=received, ended=lambda _why: worker.lose_driver(),
            most_bytes=FRAME_BYTES, beat_seconds=frames.BEAT_SECONDS,
        )  # fmt: skip
        worker.say_hello()

    def _fail(self, failures: list[Failure]) -> None:
        if any(isinstance(each.error, Refused) for each in failures):
            self._worker.lose_driver()
        else:
            self._loop.call_after(PAUSE_SECONDS, self._dial)

    def say(self, message: list[Any]) -> None:
        if self._link is not None:
            self._link.send(*message)


def come(job: ElasticJob, visitor: Visitor) -> None:
    """Let somebody come to a host who does not know the secret."""
    net = job.wires
    assert net is not None
    workers = [each for each in job.workers.values() if each.home.lives]
    # The place of a worker that has yet to come is free.
    awaited = [each for each in workers if each.lives and each.connection is None]
    if found := awaited or workers:
        worker = found[visitor.which % len(found)]
        job.guests.append(_Guest(net, visitor, worker))


class _Guest(Guest):
    """Comes to the host of a worker, perhaps as that one."""

    family = socket.AF_UNIX

    def __init__(self, net: Wires, visitor: Visitor, worker: Worker) -> None:
        self._worker = worker
        super().__init__(net, visitor, net.host(worker.host))

    def claim(self) -> Claim:
        me = Party(b"another secret", frames.WORKER, frames.DRIVER)
        return Claim.new(me, frames.claim(self._worker.number))
