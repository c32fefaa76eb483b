"""What the nodes of a parameter server have between them.

Links are between a caller and a listener: what is sent on one arrives in order, and after a
latency. A link can be cut, so that both ends lose it with what is under way, or stall in one
direction.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from hvdlite.common.connections.address import Address
from hvdlite.common.connections.loop import AwakeClock
from hvdlite.ps.connections import system
from hvdlite.ps.connections.messages import Message, head_of, pack, parse, with_arrays
from tests.simulation.lines import Line
from tests.simulation.ps.nodes import Loop, Node, Signal, here
from tests.simulation.world import Action, BrokenError

FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.02, 0.5  # Between two dials.
LEAST_BYTES = 60  # Of what says that a link begins or ends.


class Link:
    """A connection that both ends have proved."""

    def __init__(self, caller: SimulatedCaller, listener: SimulatedListener) -> None:
        self.caller, self.listener = caller, listener
        self.open = True
        self.closed_by: set[Node] = set()
        self._cluster = caller.node.cluster
        self._lines = Line(), Line()  # Toward the caller, and the listener.
        for node in self.nodes:
            node.links.append(self)

    @property
    def nodes(self) -> tuple[Node, Node]:
        return self.caller.node, self.listener.node

    def carry(
        self, source: Node, action: Action, *, to_listener: bool, count: int = LEAST_BYTES
    ) -> None:
        """Let `action` happen at the other end, unless the link is cut, or that has ended.

        It comes with `count` bytes.
        """
        world, target = self._cluster.world, self.nodes[to_listener]
        stall = self._cluster.stalls.get((source.name, target.name), 0.0)
        left = source.wire.take(world.now, count)
        at = self._lines[to_listener].arrival(left, self._cluster.latency(), stall)

        def arrive() -> None:
            if self.open and target.lives:
                action()

        world.at(at, arrive, anywhere=True)

    def close(self, source: Node) -> None:
        """Let the other end see the end after what was sent before."""
        self.closed_by.add(source)
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
        self._awake = AwakeClock(system.now)
        self.awake_seconds = self._awake.seconds
        if self._port in cluster.listeners:
            raise BrokenError("a port has one owner", f"{self.node.name} listens at {self._port}")
        cluster.listeners[self._port] = self
        self.node.listeners.append(self)

    @property
    def is_listening(self) -> bool:
        return self.node.cluster.listeners.get(self._port) is self

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
        self._awake.expect(seconds)
        self._signal.wait(lambda: bool(self._received), seconds)
        self._awake.expect(0.0)
        return self._received.popleft() if self._received else None

    def send(self, name: bytes, message: Message) -> None:
        link = self._peers.get(name)
        if link is not None and self.node.lives:
            caller = link.caller
            count, send = _sending(self.node, caller.node, message)
            link.carry(
                self.node, lambda: caller.loop.post(lambda: caller.hear(link, send())),
                to_listener=False, count=count,
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
        self, loop: Loop, address: str, role: str, name: bytes, token: bytes = b"",
        *, refused: Callable[[Exception], None], **_: Any,
    ) -> None:  # fmt: skip
        self.node, self.loop, self.name, self.role = here.task.node, loop, name, role
        self.address, self.token = address, token
        self.sharing = None
        self.trouble = ""
        self.received: Callable[[Message], None] = lambda _message: None
        self.connected: Action = lambda: None
        self.refused = refused
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
    def dials(self) -> bool:
        """Whether a link is still wanted: who closes this end gives up its dial, too."""
        return not self._closed

    @property
    def is_connected(self) -> bool:
        return self._link is not None

    takes = is_connected

    def send(self, message: Message) -> None:
        link = self._link
        if link is not None and self.node.lives:
            count, send = _sending(self.node, link.listener.node, message)
            hear = lambda: link.listener.hear(link, send())  # noqa: E731
            link.carry(self.node, hear, to_listener=True, count=count)

    def flush(self) -> None:
        """All has gone already."""

    def close(self) -> None:
        self._closed = True
        for link in (self._link, self.opens):
            if link is not None:
                link.close(self.node)
        self._link = None


def _sending(source: Node, target: Node, message: Message) -> tuple[int, Callable[[], Message]]:
    """Return how many bytes a message has, and what makes the one that arrives of them."""
    packed, payloads = pack(message)
    arrays = [memoryview(bytes(each)) for each in payloads]
    words = f"{message.kind} {message.table} {message.clock}"
    source.cluster.world.tell(source.name, f"{words} -> {target.name}")
    source.cluster.on_send(source.name, message.kind)
    count = len(packed) + sum(each.nbytes for each in arrays)
    return count, lambda: next(with_arrays(parse(head_of([packed])), arrays))
