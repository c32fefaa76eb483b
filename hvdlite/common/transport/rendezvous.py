"""The rendezvous of the ranks of one host: Unix sockets in a temporary directory.

Every rank listens in a private directory; each pair opens two connections (control messages, and
signals of the data plane), and each rank hands a memfd of its own to every peer. Afterwards the
directory is removed: nothing is left on disk, whatever kills the job.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.connections.address import short_path
from hvdlite.common.connections.strangers import check_credentials
from hvdlite.common.meeting.exchange import Interrupt

HELLO = struct.Struct("<8s16sIIB")  # MAGIC, token of the job, from rank, to rank, channel.
MAGIC = b"hvdlite1"
CONTROL, SIGNAL = 0, 1  # The channels: one connection for each between two ranks.
TOKEN_BYTES = 16


class Peer(NamedTuple):
    """The connections to one local rank."""

    control: socket.socket
    signal: socket.socket
    memory: int  # The file descriptor of the memfd that the peer owns.

    def close(self) -> None:
        """Close the connections, and this process's descriptor of the memory."""
        self.control.close()
        self.signal.close()
        os.close(self.memory)


class _Limit(NamedTuple):
    """For how long to wait for other ranks: until `deadline` (monotonic seconds), or less."""

    deadline: float
    interrupt: Interrupt | None = None

    def wait_for_input(self, connection: socket.socket) -> None:
        """Sleep until something can be read, or until the deadline. Raises as `Interrupt`."""
        if self.interrupt is None:
            return
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        poll.register(self.interrupt.fileno(), select.POLLIN)
        poll.poll(max(0.0, self.deadline - time.monotonic()) * 1000)
        self.interrupt.raise_if_over()


class MeetingFolder(NamedTuple):
    """The directory in which the ranks of one host meet; the leader makes it for all."""

    directory: str
    token: bytes

    @classmethod
    def new(cls, folder: str | None = None) -> MeetingFolder:
        """Make a new directory that only this user may enter, in `folder`. Raises `OSError`."""
        return cls(tempfile.mkdtemp(prefix="hvdlite-", dir=folder), os.urandom(TOKEN_BYTES))

    def path(self, rank: int) -> str:
        """Return the path where `rank` listens."""
        return os.path.join(self.directory, str(rank))

    def close(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


def listen(meeting: MeetingFolder, rank: int) -> socket.socket:
    """Listen at the meeting. Raises `OSError` where the directory is not visible."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with short_path(meeting.path(rank)) as path:
            listener.bind(path)
        listener.listen(1024)
    except OSError:
        listener.close()
        raise
    return listener


def meet(
    meeting: MeetingFolder,
    listener: socket.socket,
    rank: int,
    peers: tuple[int, ...],
    memory: int,
    deadline: float,
    interrupt: Interrupt | None = None,
) -> dict[int, Peer]:
    """Connect `rank` to `peers` (itself left out), all of which listen; `listener` is closed.

    `memory` is the memfd that is handed to everyone; `deadline` is in `time.monotonic` seconds, and
    `interrupt` ends all waits before it. Raises `HorovodInternalError` when a peer does not come,
    `ProtocolError` for a stranger.
    """
    limit = _Limit(deadline, interrupt)
    sockets: dict[tuple[int, int], socket.socket] = {}
    try:
        with listener:
            for peer in (lower for lower in peers if lower < rank):
                for channel in (CONTROL, SIGNAL):
                    sockets[peer, channel] = _connect(meeting, rank, peer, channel, limit)
            expected = {(p, channel) for p in peers if p > rank for channel in (CONTROL, SIGNAL)}
            while expected:
                key, connection = _accept(meeting, listener, rank, expected, limit)
                expected.remove(key)
                sockets[key] = connection
        return _exchange_memory(sockets, peers, memory, limit)
    except BaseException:
        for connection in sockets.values():
            connection.close()
        raise


def _connect(
    meeting: MeetingFolder, rank: int, peer: int, channel: int, limit: _Limit
) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        with _until(connection, limit, f"rank {peer} does not answer on its socket"):
            with short_path(meeting.path(peer)) as path:
                connection.connect(path)
            check_credentials(connection)
            connection.send(HELLO.pack(MAGIC, meeting.token, rank, peer, channel))
    except BaseException:
        connection.close()
        raise
    return connection


def _accept(
    meeting: MeetingFolder,
    listener: socket.socket,
    rank: int,
    expected: set[tuple[int, int]],
    limit: _Limit,
) -> tuple[tuple[int, int], socket.socket]:
    missing = ", ".join(str(peer) for peer in sorted({peer for peer, _ in expected}))
    with _until(listener, limit, f"these ranks of this host did not connect: {missing}"):
        limit.wait_for_input(listener)
        connection, _ = listener.accept()
    try:
        check_credentials(connection)
        with _until(connection, limit, "a local rank connected and said nothing"):
            limit.wait_for_input(connection)
            hello = connection.recv(HELLO.size + 1)
        if len(hello) != HELLO.size:
            raise ProtocolError(f"a stranger connected to rank {rank}: {len(hello)} bytes of hello")
        magic, token, sender, receiver, channel = HELLO.unpack(hello)
        known = magic == MAGIC and token == meeting.token and receiver == rank
        if not known or (sender, channel) not in expected:
            raise ProtocolError(f"a stranger connected to rank {rank}: it says {hello[:8]!r}")
    except BaseException:
        connection.close()
        raise
    return (sender, channel), connection


def _exchange_memory(
    sockets: dict[tuple[int, int], socket.socket],
    peers: tuple[int, ...],
    memory: int,
    limit: _Limit,
) -> dict[int, Peer]:
    for peer in peers:
        socket.send_fds(sockets[peer, SIGNAL], [b"m"], [memory])
    received: dict[int, int] = {}
    try:
        for peer in peers:
            signal = sockets[peer, SIGNAL]
            with _until(signal, limit, f"rank {peer} did not hand over its shared memory"):
                limit.wait_for_input(signal)
                data, descriptors, *_ = socket.recv_fds(signal, 1, 1)
            received.update((peer, descriptor) for descriptor in descriptors)
            if data != b"m" or len(descriptors) != 1:
                raise ProtocolError(f"rank {peer} did not hand over its shared memory", peer)
            os.set_inheritable(received[peer], False)
    except BaseException:
        for descriptor in received.values():
            os.close(descriptor)
        raise
    for connection in sockets.values():
        connection.setblocking(False)
    return {
        peer: Peer(sockets[peer, CONTROL], sockets[peer, SIGNAL], received[peer]) for peer in peers
    }


@contextmanager
def _until(connection: socket.socket, limit: _Limit, failure: str) -> Iterator[None]:
    """Let a blocking call on `connection` fail with `failure` at the deadline."""
    connection.settimeout(max(0.001, limit.deadline - time.monotonic()))
    try:
        yield
    except (TimeoutError, ConnectionError, FileNotFoundError) as error:
        raise HorovodInternalError(f"{failure} ({error})") from error
