"""Arrays between two ranks: straight from the memory of the sender into that of the receiver.

Two ranks have several connections, the streams, when one does not fill the link. Which bytes go
over which stream follows from the sizes and the order of the arrays alone, so that sender and
receiver need not agree: small arrays over the first stream, large ones over all in turns, and very
large ones in as many parts as there are streams. A part is a header and its bytes.
"""

from __future__ import annotations

import socket
import struct
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from hvdlite.common.base.errors import PeerLostError, ProtocolError
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import READ, WRITE, Loop
from hvdlite.common.transport.base import Array
from hvdlite.common.transport.tcp.connections import DATA, Slot

HEADER = struct.Struct("<IIQ")  # MAGIC, number of the part on its stream, bytes of the array.
MAGIC = 0x68764441  # "hvDA"
SMALL_BYTES = 64 << 10  # Such arrays need no second stream.
SPLIT_BYTES = 1 << 20  # Larger arrays are split.
ENDED = ~(READ | WRITE)  # The events of a connection that has ended: they occur unasked.


class Transfer:
    """An array that is sent or received; see `Pending`."""

    __slots__ = ("_move", "error", "parts", "rank")

    def __init__(self, rank: int, parts: int, move: Callable[[], None]) -> None:
        self.rank = rank
        self.parts = parts  # That are not complete.
        self.error: Exception | None = None
        self._move = move

    def done(self) -> bool:
        if self.parts:
            self._move()
            self.check()
        return not self.parts

    def check(self) -> None:
        """Raise the error that ended the transfer, if any."""
        if self.error is not None:
            raise self.error


class _Part:
    """What goes over one stream: the header, and bytes of the array."""

    __slots__ = ("at", "body", "header", "nbytes", "transfer")

    def __init__(self, transfer: Transfer, nbytes: int, header: Any, body: memoryview) -> None:
        self.transfer = transfer
        self.nbytes = nbytes  # Of the whole array.
        self.header = header
        self.body = body
        self.at = 0  # Bytes that were moved, with those of the header.


class Stream:
    """One connection for arrays; parts that are queued before it is connected wait."""

    def __init__(self, link: DataLink) -> None:
        self.sends: deque[_Part] = deque()
        self.receives: deque[_Part] = deque()
        self._link = link
        self._connection: socket.socket | None = None
        self._events = 0
        self._sent = self._received = 0  # Parts, for the numbers in the headers.
        self._over: OSError | None = None  # Why nothing can be moved any more.

    @property
    def connected(self) -> bool:
        return self._connection is not None

    def attach(self, connection: socket.socket) -> None:
        self._connection = connection
        self.move_out()
        self.move_in()
        self._watch()

    def send(self, transfer: Transfer, nbytes: int, body: memoryview) -> None:
        """Queue a part to be sent, and send what the connection accepts."""
        header = HEADER.pack(MAGIC, self._sent & 0xFFFFFFFF, nbytes)
        self._sent += 1
        self.sends.append(_Part(transfer, nbytes, header, body))
        if self._over is not None:
            self.end(self._over)
            return
        if len(self.sends) == 1:
            self.move_out()
        self._watch()

    def receive(self, transfer: Transfer, nbytes: int, body: memoryview) -> None:
        self.receives.append(_Part(transfer, nbytes, bytearray(HEADER.size), body))
        if self._over is not None:
            self.end(self._over)
            return
        self._watch()

    def _watch(self) -> None:
        """Watch for what there is to do. What is not needed any more is dropped when it occurs."""
        if self._connection is None:
            return
        events = (READ if self.receives else 0) | (WRITE if self.sends else 0)
        if events & ~self._events:
            self._events |= events
            self._poll_for(self._events)

    def _poll_for(self, events: int) -> None:
        assert self._connection is not None
        self._events = events
        if events:
            self._link.poller.watch(self._connection.fileno(), events, self._on_ready)
        else:
            self._link.poller.forget(self._connection.fileno())

    def _on_ready(self, events: int) -> None:
        if events & ~WRITE:
            self.move_in()
        if events & ~READ:
            self.move_out()
        wanted = (READ if self.receives else 0) | (WRITE if self.sends else 0)
        unwanted = self._events & ~wanted
        if events & (unwanted | ENDED) and unwanted:  # It would occur again at once.
            self._poll_for(wanted)

    def move_out(self) -> None:
        """Send until the connection accepts no more."""
        connection = self._connection
        if connection is None:
            return
        try:
            while self.sends:
                part = self.sends[0]
                at, size = part.at - HEADER.size, len(part.body)
                if at < 0:
                    rest = [part.header[part.at :], part.body]
                    at += connection.sendmsg(rest, (), socket.MSG_NOSIGNAL)
                else:
                    at += connection.send(part.body[at:], socket.MSG_NOSIGNAL)
                part.at = at + HEADER.size
                if at == size:
                    self.sends.popleft()
                    part.transfer.parts -= 1
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(self.sends, error)
        self._link.liveness.watch(connection, self.end)

    def move_in(self) -> None:
        """Receive until nothing is there."""
        connection = self._connection
        if connection is None:
            return
        try:
            while self.receives:
                part = self.receives[0]
                at, size = part.at - HEADER.size, len(part.body)
                if at < 0:
                    rest = [memoryview(part.header)[part.at :], part.body]
                    got = connection.recvmsg_into(rest)[0]
                    if at + got >= 0:
                        self._check(part)
                else:
                    got = connection.recv_into(part.body[at:])
                if not got:
                    self._fail(self.receives, None)
                    return
                part.at += got
                if at + got == size:
                    self.receives.popleft()
                    part.transfer.parts -= 1
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(self.receives, error)

    def _check(self, part: _Part) -> None:
        """Raise `ProtocolError` if the header is not the one that is due."""
        magic, number, nbytes = HEADER.unpack(part.header)
        rank = self._link.rank
        if (magic, number) != (MAGIC, self._received & 0xFFFFFFFF):
            raise ProtocolError(
                f"rank {rank} sent {bytes(part.header)!r} where array {self._received} begins", rank
            )
        if nbytes != part.nbytes:
            raise ProtocolError(
                f"rank {rank} sent {nbytes} bytes to rank {self._link.me}, which expected "
                f"{part.nbytes}",
                rank,
            )
        self._received += 1

    # -- ends

    def end(self, error: OSError) -> None:
        """Fail all parts, now and later: the peer is gone."""
        self._over = error
        if self._connection is not None:
            self._link.poller.forget(self._connection.fileno())
        self._fail(self.sends, error)
        self._fail(self.receives, error)

    def _fail(self, parts: deque[_Part], error: OSError | None) -> None:
        """Fail the parts that are not sent, or have not come."""
        for part in parts:
            part.transfer.error = self._link.loss(error)
        parts.clear()

    def close(self) -> None:
        if self._connection is not None:
            self._link.poller.forget(self._connection.fileno())
            self._connection.close()


def _bytes_of(array: Array) -> memoryview:
    raw: Any = array.reshape(-1).view(np.uint8)
    return memoryview(raw)


class DataLink:
    """The arrays to and from one rank."""

    def __init__(
        self,
        ranks: tuple[int, int],
        streams: int,
        poller: Loop,
        liveness: Liveness,
        loss: Callable[[int, OSError | None], PeerLostError],
        dial: Callable[[Slot], None] | None,
    ) -> None:
        """`ranks` are this one and the other; `loss` makes the error of a rank that is gone.

        `dial` connects a stream; None where the other rank does.
        """
        self.me, self.rank = ranks
        self.poller, self.liveness = poller, liveness
        self.streams = [Stream(self) for _ in range(streams)]
        self._used = 0  # Streams that were needed so far.
        self._dial = dial
        self.loss = partial(loss, self.rank)  # The error of a transfer that cannot end.
        self._sent = self._received = 0  # Arrays that took their turn.

    def send(self, array: Array) -> Transfer:
        self.use(array.nbytes)
        body = _bytes_of(array)
        cut = self._cut(body, self._sent)
        self._sent += self._takes_turn(len(body))
        transfer = Transfer(self.rank, len(cut), self._move_out)
        for stream, part in cut:
            stream.send(transfer, len(body), part)
        return transfer

    def receive(self, array: Array) -> Transfer:
        self.use(array.nbytes)
        body = _bytes_of(array)
        cut = self._cut(body, self._received)
        self._received += self._takes_turn(len(body))
        transfer = Transfer(self.rank, len(cut), self._move_in)
        for stream, part in cut:
            stream.receive(transfer, len(body), part)
        return transfer

    def use(self, nbytes: int) -> None:
        """Connect the streams that an array of `nbytes` is the first to need."""
        needed = 1 if nbytes < SMALL_BYTES else len(self.streams)
        while self._used < needed:
            if self._dial is not None:
                self._dial(Slot(self.rank, DATA, self._used))
            self._used += 1

    def _takes_turn(self, nbytes: int) -> bool:
        return SMALL_BYTES <= nbytes <= SPLIT_BYTES

    def _cut(self, body: memoryview, turn: int) -> list[tuple[Stream, memoryview]]:
        """Return which bytes go over which stream."""
        nbytes, count = len(body), len(self.streams)
        if not nbytes:
            return []
        if count == 1 or nbytes < SMALL_BYTES:
            return [(self.streams[0], body)]
        if nbytes <= SPLIT_BYTES:
            return [(self.streams[turn % count], body)]
        length = -(-nbytes // count)
        starts = range(0, nbytes, length)
        return [(s, body[at : at + length]) for s, at in zip(self.streams, starts, strict=True)]

    def _move_out(self) -> None:
        for stream in self.streams:
            if stream.sends:
                stream.move_out()

    def _move_in(self) -> None:
        for stream in self.streams:
            if stream.receives:
                stream.move_in()

    @property
    def connected(self) -> bool:
        """Whether all streams that were needed so far are connected."""
        return all(stream.connected for stream in self.streams[: self._used])

    def end(self, error: OSError) -> None:
        """Fail all arrays: the rank cannot be reached."""
        for stream in self.streams:
            stream.end(error)

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
