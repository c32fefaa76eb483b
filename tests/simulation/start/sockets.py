"""Sockets of a world, with what waits for them: the product's loops run upon these.

A connection is as one of TCP: its ends have buffers, hear of an orderly end after all that was
sent, and of a reset where something unread was thrown away. A killed process has all of its
descriptors closed; a host that is lost says nothing any more. Numbers of descriptors are used again
as the kernel does: the lowest that is free.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.common.connections.strangers import CREDENTIALS, LINGER
from tests.simulation.lines import Line, Wire
from tests.simulation.world import BrokenError, Process, World

READ, WRITE, ERROR = select.EPOLLIN, select.EPOLLOUT, select.EPOLLERR
NEAR_SECONDS = 2e-5  # Between processes of one host.
AGAIN_SECONDS = 1.0  # After which the kernel asks again that has had no answer.
FIRST_PORT, FIRST_NUMBER = 40000, 3


class _Here(threading.local):
    node: Node
    process: Process


here = _Here()


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
        self.open: dict[int, Any] = {}
        self.folders: set[str] = set()
        self.processes: list[Process] = []  # Its threads.

    def take(self, what: Any) -> int:
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
            if isinstance(each, Socket):
                each.close()
        self.open.clear()


class Net:
    """All hosts, and what is between them."""

    def __init__(
        self, world: World, hosts: int, latency: float, bytes_per_second: float, window: int
    ) -> None:
        """The buffers of a connection hold `window` bytes in each direction."""
        self.world, self.window = world, window
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

    def fail(self, process: Process, error: BaseException) -> None:
        """Note what has ended a thread that none may end by."""
        if not isinstance(error, BrokenError):
            text = f"a thread of {process.name} fails: {error!r}"
            error = BrokenError("the job ends by the rules", text).with_traceback(
                error.__traceback__
            )
        self.failure = self.failure or error

    def new_port(self) -> int:
        self._port += 1
        return self._port

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

        world.at(source.line.arrival(left, latency, stalled), arrive)


class Socket:
    """One end of a connection, or what listens. Has the methods of `socket.socket`."""

    def __init__(self, net: Net, node: Node, family: int) -> None:
        self.node, self.family = node, family
        self.line = Line()
        self.inbox = bytearray()
        self.backlog: deque[Socket] = deque()
        self.peer: Socket | None = None
        self.epolls: dict[Epoll, None] = {}
        self.name: Any = ("", 0)
        self.connected = self.closed = self.is_listening = False
        self.error = 0
        self.sends = 0
        self.unconfirmed = 0  # Bytes that have not arrived.
        self.waits_for_room = False
        self._net = net
        self._number = -1
        self._peer_ended = self._has_ended = self._resets = False
        self._probe: dict[int, int] = {}  # Options of keepalive.

    def opened(self) -> Socket:
        """Give it a number."""
        self._number = self.node.take(self)
        return self

    def fileno(self) -> int:
        return self._number

    def setblocking(self, flag: bool) -> None:
        """Nothing blocks."""

    def __enter__(self) -> Socket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what is ready

    def events(self) -> int:
        if self.is_listening:
            return READ if self.backlog else 0
        found = READ if self.inbox or self._peer_ended else 0
        if self.error:
            return READ | WRITE | ERROR
        return found | (WRITE if self.connected and self._room() > 0 else 0)

    def _room(self) -> int:
        waiting = len(self.peer.inbox) if self.peer is not None else 0
        return self._net.window - self.unconfirmed - waiting

    def changed(self) -> None:
        for epoll in self.epolls:
            epoll.poke()

    # -- listening

    def bind(self, address: Any) -> None:
        if self.family == socket.AF_UNIX:
            self.name = address or b"\0%05d" % self._net.new_port()
        else:
            self.name = (address[0], address[1] or self._net.new_port())
        if self._place(self.name) in self._net.listening:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self._net.listening[self._place(self.name)] = self

    def _place(self, address: Any) -> object:
        return (self.node.host, address) if self.family == socket.AF_UNIX else tuple(address[:2])

    def listen(self, _backlog: int = 0) -> None:
        self.is_listening = True

    def accept(self) -> tuple[Socket, Any]:
        if not self.backlog:
            raise BlockingIOError
        connection = self.backlog.popleft().opened()
        return connection, connection.getpeername()

    # -- connecting

    def connect_ex(self, address: Any) -> int:
        net = self._net
        if self.family == socket.AF_UNIX:
            listener = net.listening.get(self._place(address))
            if listener is None:
                return errno.ECONNREFUSED
            self._meet(listener)
            self.connected = True
            return 0
        self.name = (self.node.host.address, net.new_port())
        self._ask(tuple(address[:2]))
        return errno.EINPROGRESS

    def _ask(self, address: tuple[str, int]) -> None:
        host = next((each for each in self._net.hosts if each.address == address[0]), None)
        if host is not None and not self.closed:
            self._net.carry(self, host, 60, partial(self._asked, address, host))

    def _asked(self, address: tuple[str, int], host: Host) -> None:
        """See at the other host whether somebody listens there."""
        listener = self._net.listening.get(address)
        if listener is None or not listener.is_listening:
            # The answer of a host that has no socket for it takes as long as the way there.
            self._net.world.after(1e-4, lambda: self.reset(errno.ECONNREFUSED))
            return
        other = self._meet(listener)
        self._net.carry(other, self.node.host, 60, self._has_connected)

    def _meet(self, listener: Socket) -> Socket:
        other = Socket(self._net, listener.node, self.family)
        other.name, other.peer, other.connected = listener.name, self, True
        self.peer = other
        self._net.sockets += [self, other]
        listener.backlog.append(other)
        listener.changed()
        return other

    def _has_connected(self) -> None:
        if self.closed and self.peer is not None:
            self.peer.reset()
        elif not self.error:
            self.connected = True
            self.changed()

    # -- data

    def send(self, data: Any, _flags: int = 0) -> int:
        if not self.node.lives:
            return len(data)
        if self.error or self._has_ended or self.peer is None:
            code = errno.EPIPE if self.error in (0, errno.ECONNRESET) else self.error
            raise OSError(code, os.strerror(code))
        room = self._room()
        if room <= 0:
            self.waits_for_room = True
            raise BlockingIOError
        part = bytes(memoryview(data)[:room])
        self.sends += 1
        if self.sends == 1:
            self._net.claims.append(part)
        self._net.on_send(self)
        self.unconfirmed += len(part)
        self._net.carry(self, self.peer.node.host, len(part), partial(self._arrive, part))
        return len(part)

    def sendmsg(self, parts: Sequence[Any], _ancillary: object = (), _flags: int = 0) -> int:
        return self.send(b"".join(parts))

    def _arrive(self, part: bytes) -> None:
        self.unconfirmed -= len(part)
        peer = self.peer
        if peer is None or self.error:
            return
        if peer.closed:
            self.reset()
        elif not peer.error:
            peer.inbox += part
            peer.changed()
        self.changed()

    def recv(self, count: int) -> bytes:
        data = bytes(self.inbox[:count])
        if not data:
            if self.error:
                raise OSError(self.error, os.strerror(self.error))
            if not self._peer_ended and self.node.lives:
                raise BlockingIOError
            return b""
        del self.inbox[:count]
        if self.peer is not None and self.peer.waits_for_room:
            self.peer.waits_for_room = False
            self._net.world.after(NEAR_SECONDS, self.peer.changed)
        return data

    def recvmsg_into(self, buffers: Sequence[memoryview]) -> tuple[int]:
        data = self.recv(sum(len(each) for each in buffers))
        at = 0
        for each in buffers:
            part = data[at : at + len(each)]
            each[: len(part)] = part
            at += len(part)
        return (len(data),)

    # -- options

    def getsockname(self) -> Any:
        return self.name

    def getpeername(self) -> Any:
        if self.peer is None:
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))
        return self.peer.name

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        if (level, option) == (socket.SOL_SOCKET, socket.SO_LINGER):
            self._resets = value == LINGER.pack(1, 0)
        elif level == socket.IPPROTO_TCP:
            self._probe[option] = value
        elif option == socket.SO_KEEPALIVE:
            self._probe[socket.SO_KEEPALIVE] = value
            self.probe()

    def getsockopt(self, _level: int, option: int, _size: int = 0) -> Any:
        if option == socket.SO_PEERCRED:
            return CREDENTIALS.pack(1, os.geteuid() + self._is_of_stranger(), 0)
        return self.error if option == socket.SO_ERROR else struct.pack("i", 0)

    def _is_of_stranger(self) -> bool:
        return self.peer is not None and self.peer.node.is_stranger

    def probe(self) -> None:
        """See that the other host is lost, after the limit of keepalive."""
        options = self._probe
        if self.peer is not None and self.peer.node.host.down and socket.SO_KEEPALIVE in options:
            seconds = options[socket.TCP_KEEPINTVL] * options[socket.TCP_KEEPCNT]
            seconds += options[socket.TCP_KEEPIDLE]
            self._net.world.after(seconds, lambda: self.reset(errno.ETIMEDOUT))

    # -- the end

    def reset(self, code: int = errno.ECONNRESET) -> None:
        """See that the connection is lost."""
        if not self.closed and not self.error:
            self.error = code
            self.changed()

    def shutdown(self, _how: int) -> None:
        if not self._has_ended and self.peer is not None and self.connected:
            self._has_ended = True
            self._net.carry(self, self.peer.node.host, 0, self._tell_end)

    def _tell_end(self) -> None:
        peer = self.peer
        if peer is not None and not self.error:
            peer._peer_ended = True
            peer.changed()

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self.node.open.pop(self._number, None)
        for epoll in self.epolls:
            epoll.drop(self._number)
        if self._net.listening.get(self._place(self.name)) is self:
            del self._net.listening[self._place(self.name)]
        for each in self.backlog:
            each._throw_away()
        if self.peer is not None:
            self._throw_away()

    def _throw_away(self) -> None:
        peer = self.peer
        assert peer is not None
        self._net.sockets.remove(self)
        self.closed = True
        if self.error:
            return
        if self.inbox or self._resets:
            self._net.carry(self, peer.node.host, 0, peer.reset)
        else:
            self.shutdown(socket.SHUT_WR)


class Epoll:
    """Has the methods of `select.epoll`."""

    def __init__(self) -> None:
        self._node = here.node
        self._masks: dict[int, int] = {}
        self._number = self._node.take(self)
        self._sleeper: Process | None = None

    def register(self, number: int, events: int) -> None:
        self._masks[number] = events
        self._node.open[number].epolls[self] = None
        self.poke()

    def modify(self, number: int, events: int) -> None:
        self._masks[number] = events
        self.poke()

    def unregister(self, number: int) -> None:
        if self._node.lives:
            del self._masks[number]
            del self._node.open[number].epolls[self]

    def drop(self, number: int) -> None:
        """Forget what was closed."""
        self._masks.pop(number, None)

    def poke(self) -> None:
        if self._sleeper is not None:
            self._sleeper.poke()

    def _ready(self) -> list[tuple[int, int]]:
        found = []
        for number, mask in self._masks.items():
            events = self._node.open[number].events() & (mask | ERROR)
            if events:
                found.append((number, events))
        return found

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        self._sleeper = process = here.process
        process.sleep_until(lambda: bool(self._ready()), timeout)
        self._sleeper = None
        ready = self._ready()
        if len(ready) > 1:
            self._node.net.world.lot.shuffle(ready)
        return ready

    def close(self) -> None:
        self._node.open.pop(self._number, None)
        for number in self._masks:
            if number in self._node.open:
                self._node.open[number].epolls.pop(self, None)


class _Flag:
    """What the kernel has of an event."""

    def __init__(self) -> None:
        self.is_set = False
        self.epolls: dict[Epoll, None] = {}

    def events(self) -> int:
        return READ if self.is_set else 0


class Event:
    """Has the methods of what ends the sleep of a loop; closed with the last reference to it."""

    def __init__(self) -> None:
        self._flag, self._node = _Flag(), here.node
        self.number = self._node.take(self._flag)

    def set(self) -> None:
        self._flag.is_set = True
        for epoll in self._flag.epolls:
            epoll.poke()

    def clear(self) -> None:
        self._flag.is_set = False

    def __del__(self) -> None:
        if self._node.lives:
            self._node.open.pop(self.number, None)
