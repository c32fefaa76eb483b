"""The hosts on which ranks start, their processes, and what is between them.

A killed process has all of its descriptors closed; a host that is lost says nothing any more.
Numbers of descriptors are used again as the kernel does: the lowest that is free.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tests.simulation.lines import Wire
from tests.simulation.world import BrokenError, Process, World

if TYPE_CHECKING:
    from tests.simulation.start.sockets import Socket

NEAR_SECONDS = 2e-5  # Between processes of one host.
FIRST_PORT, FIRST_NUMBER = 40000, 3


class _Here(threading.local):
    node: Node
    process: Process


here = _Here()


class Descriptor(Protocol):
    """What a process has open."""

    def close(self) -> None:
        """Close it."""


class Memory:
    """Memory that others of the host could map."""

    def close(self) -> None:
        """It is gone with the process."""


class Host:
    """A host, with its address, and the wire that leads to others."""

    def __init__(self, number: int, bytes_per_second: float) -> None:
        self.name, self.address = f"node{number}", f"10.0.{number}.1"
        self.wire = Wire(bytes_per_second)
        self.down = False


class Node:
    """A process of a host, with what it has open by number."""

    def __init__(self, net: Net, name: str, host: Host, *, is_stranger: bool = False) -> None:
        self.net, self.name, self.host, self.is_stranger = net, name, host, is_stranger
        self.lives = True
        self.environ = {"HVDLITE_HOST_NAME": host.name}
        self.open: dict[int, Descriptor] = {}
        self.folders: set[str] = set()
        self.processes: list[Process] = []  # Its threads.

    def take(self, what: Descriptor) -> int:
        """Give a number to what is opened."""
        number = FIRST_NUMBER
        while number in self.open:
            number += 1
        self.open[number] = what
        return number

    def kill(self) -> None:
        """End all threads, and have the kernel close everything."""
        self.end()
        for each in self.processes:
            each.kill()

    def end(self) -> None:
        """Have the kernel close everything."""
        self.lives = False
        for each in [*self.open.values()]:
            each.close()
        self.open.clear()


class Net:
    """All hosts, and what is between them."""

    def __init__(
        self, world: World, hosts: int, latency: float, bytes_per_second: float, window: int
    ) -> None:
        """The buffers of a connection hold `window` bytes in each direction."""
        self.world, self.window = world, window
        self.nonces = random.Random(f"{world.seed} nonces")  # Of proofs.
        self.hosts = [Host(number, bytes_per_second) for number in range(hosts)]
        self.listening: dict[object, Socket] = {}
        self.sockets: list[Socket] = []  # That are connected.
        self.claims: list[bytes] = []  # What was sent first on connections.
        self.come: dict[str, dict[int, Process]] = {}  # Ranks of a host, by their folder.
        self.on_send: Callable[[Socket], None] = lambda _connection: None
        self.failure: BrokenError | None = None
        self._latency = latency
        self._stalls: dict[tuple[Host, Host], float] = {}
        self._port = FIRST_PORT

    def fail(self, process: Process | None, error: BaseException) -> None:
        """Note what has ended a thread that none may end by."""
        if not isinstance(error, BrokenError):
            who = "somebody" if process is None else process.name
            text = f"a thread of {who} fails: {error!r}"
            error = BrokenError("the job ends by the rules", text).with_traceback(
                error.__traceback__
            )
        self.failure = self.failure or error

    def new_port(self) -> int:
        self._port += 1
        return self._port

    def listener_at(self, address: object, _caller: Node) -> Socket | None:
        """Return who listens at an address, as far as the caller can tell."""
        return self.listening.get(address)

    def stall(self, source: Host, target: Host, seconds: float) -> None:
        """Let nothing arrive for a while in one direction."""
        self._stalls[source, target] = self.world.now + seconds

    def cut(self, one: Node, other: Node) -> None:
        """End all connections between two processes, with what is under way."""
        for each in [*self.sockets]:
            if each.node is one and each.peer is not None and each.peer.node is other:
                each.peer.reset()
                each.reset()

    def lose(self, host: Host) -> None:
        """Let a host say nothing any more; those who probe it see that after their limit."""
        host.down = True
        for each in [*self.sockets]:
            if each.peer is not None and each.peer.node.host is host:
                each.probe()

    def carry(self, source: Socket, target: Host, count: int, action: Callable[[], None]) -> None:
        """Let `action` happen at a host, after all that `source` has sent before."""
        world, own = self.world, source.node.host
        left, latency = world.now, NEAR_SECONDS
        if own is not target:
            left, latency = own.wire.take(left, count), self._latency
        latency *= 0.5 + world.lot.random()
        stalled = self._stalls.get((own, target), 0.0)

        def arrive() -> None:
            if not (own.down or target.down):
                action()

        world.at(source.line.arrival(left, latency, stalled), arrive, anywhere=True)
