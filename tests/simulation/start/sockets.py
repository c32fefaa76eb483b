"""Sockets of a world: the loops of the product run upon these.

A connection is as one of TCP: its ends have buffers, hear of an orderly end after all that was
sent, and of a reset where something unread was thrown away.
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hvdlite.common.connections.strangers import CREDENTIALS, LINGER
from tests.simulation.lines import Line
from tests.simulation.start.net import NEAR_SECONDS, Host, Net, Node

if TYPE_CHECKING:
    from tests.simulation.start.epolls import Epoll

READ, WRITE, ERROR = select.EPOLLIN, select.EPOLLOUT, select.EPOLLERR


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
        listener = self._net.listener_at(address, self.node)
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
