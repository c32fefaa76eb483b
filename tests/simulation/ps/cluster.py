"""What the nodes of a parameter server have between them, and their disks.

Links are between a caller and a listener: what is sent on one arrives in order, and after a
latency. A link can be cut, so that both ends lose it with what is under way, or stall in one
direction. A disk can be full or slow, and loses what was not synchronized when its host crashes.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import patch

from hvdlite.common.connections.address import Address
from hvdlite.common.plain.handles import Handle
from hvdlite.ps.connections import client, outside
from hvdlite.ps.connections.messages import Message, pack, parse
from hvdlite.ps.scheduler import running as scheduler_running
from hvdlite.ps.server import running as server_running
from tests.simulation.ps.nodes import (
    Condition,
    Event,
    KilledThread,
    Loop,
    Node,
    Queue,
    Signal,
    Task,
    here,
    new_thread,
    sleep_for,
)
from tests.simulation.world import Action, BrokenError, World

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5  # Between two dials.
SYNC_SECONDS = 1e-3


# Links.


class Link:
    """A connection that both ends have proved."""

    def __init__(self, caller: SimulatedCaller, listener: SimulatedListener) -> None:
        self.caller, self.listener = caller, listener
        self.open = True
        self._cluster = caller.node.cluster
        self._busy = [0.0, 0.0]  # Until then, toward the caller and the listener.
        for node in self.nodes:
            node.links.append(self)

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.caller.node, self.listener.node

    def carry(self, source: Node, action: Action, *, to_listener: bool) -> None:
        """Let `action` happen at the other end, unless the link is cut, or that has ended."""
        world, target = self._cluster.world, self.nodes[to_listener]
        stall = self._cluster.stalls.get((source.name, target.name), 0.0)
        at = max(self._busy[to_listener], world.now + self._cluster.latency(), stall)
        self._busy[to_listener] = at

        def arrive() -> None:
            if self.open and target.lives:
                action()

        world.at(at, arrive)

    def close(self, source: Node) -> None:
        """Let the other end see the end after what was sent before."""
        if source is self.caller.node:
            self.carry(source, self._lose_at_listener, to_listener=True)
        else:
            self.carry(source, self._lose_at_caller, to_listener=False)

    def cut(self) -> None:
        """Lose what is under way, at both ends."""
        if self.open:
            self.open = False
            for node in self.nodes:
                node.links.remove(self)
            self._lose_at_listener()
            self._lose_at_caller()

    def _lose_at_listener(self) -> None:
        self.listener.lose(self)

    def _lose_at_caller(self) -> None:
        if self.caller.node.lives:
            self.caller.loop.post(partial(self.caller.lose, self))


class SimulatedListener:
    """Has the methods of `channel.Listener`."""

    def __init__(self, address: Address, role: str, token: bytes = b"", **_: Any) -> None:
        self.node, self.role, self.token = here.task.node, role, token
        self.memory = None
        cluster = self.node.cluster
        self._port = address.port or cluster.new_port()
        self.address = f"127.0.0.1:{self._port}"
        self._peers: dict[bytes, Link] = {}
        self._received: deque[tuple[bytes, Message]] = deque()
        self._signal = Signal()
        if self._port in cluster.listeners:
            raise BrokenError("a port has one owner", f"{self.node.name} listens at {self._port}")
        cluster.listeners[self._port] = self
        self.node.listeners.append(self)

    def open_memory(self) -> None:
        """Nobody shares memory."""

    def let_in(self, link: Link) -> None:
        self.drop(link.caller.name)
        self._peers[link.caller.name] = link

    def drop(self, name: bytes) -> None:
        link = self._peers.pop(name, None)
        if link is not None:
            link.close(self.node)

    def lose(self, link: Link) -> None:
        if self._peers.get(link.caller.name) is link:
            del self._peers[link.caller.name]

    def hear(self, link: Link, message: Message) -> None:
        if self._peers.get(link.caller.name) is link:
            self._received.append((link.caller.name, message))
            self._signal.give()

    def receive(self, seconds: float) -> tuple[bytes, Message] | None:
        self._signal.wait(lambda: bool(self._received), seconds)
        return self._received.popleft() if self._received else None

    def send(self, name: bytes, message: Message) -> None:
        link = self._peers.get(name)
        if link is not None and self.node.lives:
            caller = link.caller
            send = _sending(self.node, caller.node, message)
            link.carry(
                self.node, lambda: caller.loop.post(lambda: caller.hear(link, send())),
                to_listener=False,
            )  # fmt: skip

    def shut(self) -> None:
        self.node.cluster.listeners.pop(self._port, None)

    def close(self) -> None:
        self.shut()
        for name in [*self._peers]:
            self.drop(name)


class SimulatedCaller:
    """Has the methods of `channel.Caller`."""

    def __init__(
        self, loop: Loop, address: str, role: str, name: bytes, token: bytes = b"", **_: Any
    ) -> None:
        self.node, self.loop, self.name, self.role = here.task.node, loop, name, role
        self.address, self.token = address, token
        self.sharing = None
        self.trouble = ""
        self.received: Callable[[Message], None] = lambda _message: None
        self.connected: Action = lambda: None
        self.refused: Callable[[Exception], None] = lambda _error: None
        self._pause = FIRST_PAUSE_SECONDS
        self.opens: Link | None = None  # Of which this end has not heard yet.
        self._link: Link | None = None
        self._closed = False
        loop.post(self._dial)

    def _dial(self) -> None:
        if not self._closed:
            self.node.cluster.dial(self)

    def fail(self, trouble: str) -> None:
        self.trouble = trouble
        self._again()

    def _again(self) -> None:
        self.node.cluster.world.after(self._pause, lambda: self.loop.post(self._dial))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)

    def begin(self, link: Link) -> None:
        self.opens = None
        if self._closed:
            link.close(self.node)
            return
        self._link, self._pause = link, FIRST_PAUSE_SECONDS
        self.connected()

    def lose(self, link: Link) -> None:
        if link in (self._link, self.opens):
            self._link = self.opens = None
            if not self._closed:
                self.fail("it has closed the connection")

    def hear(self, link: Link, message: Message) -> None:
        if self._link is link:
            self.received(message)

    @property
    def takes(self) -> bool:
        return self._link is not None

    def send(self, message: Message) -> None:
        link = self._link
        if link is not None and self.node.lives:
            send = _sending(self.node, link.listener.node, message)
            link.carry(self.node, lambda: link.listener.hear(link, send()), to_listener=True)

    def flush(self) -> None:
        """All has gone already."""

    def close(self) -> None:
        self._closed = True
        if self._link is not None:
            self._link.close(self.node)
            self._link = None


def _sending(source: Node, target: Node, message: Message) -> Callable[[], Message]:
    """Return what makes the message that arrives, of its bytes."""
    head, payloads = pack(message), [memoryview(bytes(each)) for each in message.payloads]
    words = f"{message.kind} {message.table} {message.clock}"
    source.cluster.world.tell(source.name, f"{words} -> {target.name}")
    source.cluster.on_send(source.name, message.kind)
    return lambda: parse(head)._replace(payloads=payloads)


# Disks.


class _File:
    """A file on the disk of a node."""

    def __init__(self, node: Node, path: Path) -> None:
        self._node, self.path = node, path
        self._file = open(path, "wb")  # noqa: SIM115
        node.files[path] = None

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, data: bytes | memoryview) -> None:
        _work(self._node, self._node.slow)
        if self._node.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self._file.write(data)
        self._file.flush()

    def tell(self) -> int:
        return self._file.tell()


def _work(node: Node, seconds: float) -> None:
    """Take the time of a disk."""
    if seconds:
        here.task.sleep_until(lambda: False, seconds)
    elif not node.lives:
        raise KilledThread


def _new_file(path: Path) -> _File:
    node = here.task.node
    _work(node, 0.0)
    return _File(node, path)


def _sync(file: BinaryIO | _File) -> None:
    assert isinstance(file, _File)
    node = here.task.node
    _work(node, SYNC_SECONDS + node.slow)
    node.files.pop(file.path, None)


def _replace(source: Path, target: Path) -> None:
    node = here.task.node
    _work(node, node.slow)
    node.renames.append((source, target, target.read_bytes() if target.exists() else None))
    os.replace(source, target)
    if source in node.files:
        del node.files[source]
        node.files[target] = None


def _sync_folder(path: Path) -> None:
    node = here.task.node
    _work(node, SYNC_SECONDS)
    node.renames = [each for each in node.renames if each[1].parent != path]


# The cluster.


class Cluster:
    """The nodes of a job, and what is between them."""

    def __init__(self, world: World, latency: float) -> None:
        self.world = world
        self.listeners: dict[int, SimulatedListener] = {}
        self.stalls: dict[tuple[str, str], float] = {}  # From whom, to whom -> until then.
        self.cuts: dict[frozenset[str], float] = {}  # Who do not reach each other -> until then.
        self.nodes: list[Node] = []
        self.failure: BaseException | None = None  # Of a thread, which none may have.
        self.on_send: Callable[[str, str], object] = lambda _name, _kind: None
        self.wall = 0.0  # By how much the clock on the wall differs.
        self._latency = latency
        self._port = 20000

    def node(self, name: str) -> Node:
        self.nodes.append(Node(self, name))
        return self.nodes[-1]

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def latency(self) -> float:
        return self._latency * (0.5 + self.world.lot.random())

    def fail(self, task: Task, error: BaseException) -> None:
        self.failure = self.failure or error
        self.world.tell(task.name, f"fails: {error!r}")

    def are_cut(self, one: Node, other: Node) -> bool:
        return self.cuts.get(frozenset((one.name, other.name)), 0.0) > self.world.now

    def cut(self, one: Node, other: Node, seconds: float) -> None:
        """End what two nodes have open between them, and let them not reach each other."""
        self.cuts[frozenset((one.name, other.name))] = self.world.now + seconds
        for link in [each for each in one.links if other in each.nodes]:
            link.cut()

    def dial(self, caller: SimulatedCaller) -> None:
        """Open a link, or say why there is none."""
        port = int(caller.address.rpartition(":")[2])

        def arrive() -> None:
            listener = self.listeners.get(port)
            if listener is None or self.are_cut(caller.node, listener.node):
                self.world.after(self.latency(), lambda: self._refuse(caller, "nobody is there"))
            elif (caller.role, caller.token) != (listener.role, listener.token):
                self.world.after(self.latency(), lambda: self._refuse(caller, "it is another"))
            elif caller.node.lives:
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
        stand_ins: Sequence[tuple[Any, str, Any]] = [
            (outside, "now", world.clock),
            (outside, "rising_number", lambda: int((world.clock() + self.wall + 1e6) * 1e9)),
            (outside, "sleep", lambda seconds: here.task.sleep_until(lambda: False, seconds)),
            (outside, "random_bytes", world.lot.randbytes),
            (outside, "Thread", new_thread),
            (outside, "Event", Event),
            (outside, "Condition", Condition),
            (outside, "Queue", Queue),
            (outside, "new_file", _new_file),
            (outside, "sync", _sync),
            (outside, "replace", _replace),
            (outside, "sync_folder", _sync_folder),
            (client, "Loop", Loop),
            (client, "Caller", SimulatedCaller),
            (client, "SharedMemory", _no_memory),
            (scheduler_running, "Listener", SimulatedListener),
            (server_running, "Listener", SimulatedListener),
            (Handle, "_sleep", sleep_for),
        ]
        with ExitStack() as stack:
            for owner, name, stand_in in stand_ins:
                stack.enter_context(patch.object(owner, name, stand_in))
            yield


def _no_memory() -> None:
    raise OSError("no memory is shared")
