"""The nodes of a job of the parameter server in a world, and what is outside of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

from hvdlite.common.requests.handles import Handle
from hvdlite.ps.connections import client, system
from hvdlite.ps.scheduler import running as scheduler_running
from hvdlite.ps.server import running as server_running
from tests.simulation.ps import disks
from tests.simulation.ps.links import Link, SimulatedCaller, SimulatedListener
from tests.simulation.ps.nodes import (
    Condition,
    Event,
    Loop,
    Node,
    Queue,
    Task,
    here,
    new_thread,
    sleep_for,
)
from tests.simulation.ps.wires import Wires, stand_ins
from tests.simulation.start.laws import watched
from tests.simulation.world import BrokenError, World, in_place


class Named(Protocol):
    """A node, as far as it is known to others."""

    name: str


class Cluster:
    """The nodes of a job, and what is between them."""

    def __init__(
        self, world: World, latency: float, bytes_per_second: float, *, proves: bool = False
    ) -> None:
        self.world, self.bytes_per_second = world, bytes_per_second
        self.net = Wires(self, latency, bytes_per_second) if proves else None
        self.listeners: dict[int, SimulatedListener] = {}
        self.stalls: dict[tuple[str, str], float] = {}  # From whom, to whom -> until then.
        self.cuts: dict[frozenset[str], float] = {}  # Who do not reach each other -> until then.
        self.nodes: list[Node] = []
        self.failure: BaseException | None = None  # Of a thread, which none may have.
        self.on_send: Callable[[str, str], object] = lambda _name, _kind: None
        self.wall = 0.0  # By how much the clock on the wall differs.
        self._latency = latency
        self._port = 20000

    def node(self, name: str, *, is_stranger: bool = False) -> Node:
        self.nodes.append(Node(self, name, is_stranger=is_stranger))
        return self.nodes[-1]

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def latency(self) -> float:
        return self._latency * (0.5 + self.world.lot.random())

    def fail(self, task: Task, error: BaseException) -> None:
        self.failure = self.failure or error
        self.world.tell(task.name, f"fails: {error!r}")

    def fail_by(self, broken: BrokenError) -> None:
        self.failure = self.failure or broken

    def stall(self, source: str, target: str, seconds: float) -> None:
        """Let nothing arrive for a while in one direction."""
        self.stalls[source, target] = self.world.now + seconds
        if self.net is not None:
            self.net.stall(self.net.host(source), self.net.host(target), seconds)

    def are_cut(self, one: Named, other: Named) -> bool:
        return self.cuts.get(frozenset((one.name, other.name)), 0.0) > self.world.now

    def cut(self, one: Node, other: Node, seconds: float) -> None:
        """End what two nodes have open between them, and let them not reach each other."""
        self.cuts[frozenset((one.name, other.name))] = self.world.now + seconds
        for link in [each for each in one.links if other in each.nodes]:
            link.cut()
        if self.net is not None and one.opened is not None and other.opened is not None:
            self.net.cut(one.opened, other.opened)

    def dial(self, caller: SimulatedCaller) -> None:
        """Open a link, or say why there is none."""
        port = int(caller.address.rpartition(":")[2])

        def arrive() -> None:
            listener = self.listeners.get(port)
            if listener is None or self.are_cut(caller.node, listener.node):
                self.world.after(self.latency(), lambda: self._refuse(caller, "nobody is there"))
            elif (caller.role, caller.token) != (listener.role, listener.token):
                self.world.after(self.latency(), lambda: self._refuse(caller, "it is another"))
            elif caller.dials and caller.node.lives:
                link = caller.opens = Link(caller, listener)
                listener.let_in(link)
                begin = partial(caller.loop.post, partial(caller.begin, link))
                link.carry(listener.node, begin, to_listener=False)

        self.world.after(2 * self.latency(), arrive)

    def _refuse(self, caller: SimulatedCaller, why: str) -> None:
        if caller.node.lives:
            caller.loop.post(partial(caller.fail, why))

    def close(self) -> None:
        """End all nodes."""
        for node in self.nodes:
            node.kill()

    def waiting(self) -> list[str]:
        """Return who waits, and in which function."""
        words = []
        for node in self.nodes:
            if node.lives and node.tasks:
                words.append(f"{node.name} waits in {' < '.join(node.tasks[0].stack())}")
        return words

    @contextmanager
    def around(self) -> Iterator[None]:
        """Be what is outside of all processes."""
        world = self.world
        ours: list[tuple[Any, str, Any]] = [
            (system, "now", world.clock),
            (system, "rising_number", lambda: int((world.clock() + self.wall + 1e6) * 1e9)),
            (system, "sleep", lambda seconds: here.task.sleep_until(lambda: False, seconds)),
            (system, "random_bytes", world.lot.randbytes),
            (system, "Thread", new_thread),
            (system, "Event", Event),
            (system, "Condition", Condition),
            (system, "Queue", Queue),
            (system, "new_file", disks.new_file),
            (system, "longer_file", disks.longer_file),
            (system, "sync", disks.sync),
            (system, "replace", disks.replace),
            (system, "sync_folder", disks.sync_folder),
            (client, "SharedMemory", _no_memory),
            (Handle, "_sleep", sleep_for),
        ]
        if self.net is not None:
            with in_place([*ours, *stand_ins(self.net)]), watched():
                yield
            return
        ours += [
            (client, "Loop", Loop),
            (client, "Caller", SimulatedCaller),
            (scheduler_running, "Listener", SimulatedListener),
            (server_running, "Listener", SimulatedListener),
        ]
        with in_place(ours):
            yield


def _no_memory() -> None:
    raise OSError("no memory is shared")
