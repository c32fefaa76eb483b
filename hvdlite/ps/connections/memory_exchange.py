"""Where processes of one host meet to hand each other their memory, beside their links.

A server listens at an abstract Unix socket, which leaves no file: whoever can connect is on the
same host, in the same network namespace. The two hand over the descriptors of their memory, and
keep the connection, whose end says that a process is gone.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.strangers import check_credentials
from hvdlite.ps.connections.shared_memory import SharedMemory, Window
from hvdlite.ps.connections.shared_payloads import Sharing

HELLO = struct.Struct("<8sQ")  # MAGIC and the session; the name of the peer follows.
MAGIC = b"hvdlips1"
MEET_SECONDS = 5.0  # For which each side waits for the words of the other.
MOST_HELLO_BYTES = 1024
PAUSE_SECONDS = 0.1


def new_name() -> str:
    """Return a name that no other process has; it is also that of the server's Unix socket."""
    return f"hvdlite-ps-{os.urandom(16).hex()}"


def _path(name: str) -> str:
    return f"\0{name}.memory"


class MemoryListener:
    """The listening end, with a thread. `sharings` has those who have come, by their name."""

    def __init__(self, memory: SharedMemory, name: str) -> None:
        self.sharings: dict[bytes, Sharing] = {}
        self._shared = memory
        self._connections: dict[int, tuple[socket.socket, bytes]] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(_path(name))
        self._listener.listen(128)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="hvdlite ps memory", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and all connections."""
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        os.close(self._wake_fd)
        self._listener.close()
        for connection, _ in self._connections.values():
            connection.close()
        for sharing in self.sharings.values():
            sharing.close()
        self.sharings.clear()

    def _run(self) -> None:
        poll = select.poll()
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._wake_fd:
                    return
                if descriptor == self._listener.fileno():
                    if (connection := self._accept()) is not None:
                        poll.register(connection, select.POLLIN)
                else:  # Nothing is said after the greeting: this is the end of the connection.
                    poll.unregister(descriptor)
                    self._forget(descriptor)

    def _accept(self) -> socket.socket | None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # Without a free descriptor, whoever comes waits for a moment.
            select.select([self._wake_fd], [], [], PAUSE_SECONDS)
            return None
        try:
            check_credentials(connection)
            connection.settimeout(MEET_SECONDS)
            session, peer, window = _receive(connection)
            sharing = Sharing(session, self._shared, window)
            self._drop(peer)
            self.sharings[peer] = sharing  # Before the peer hears of it, and sends places.
            _send(connection, session, b"", self._shared)
        except (OSError, ProtocolError):
            connection.close()
            return None
        self._connections[connection.fileno()] = connection, peer
        return connection

    def _forget(self, descriptor: int) -> None:
        connection, peer = self._connections.pop(descriptor)
        connection.close()
        if not any(peer == other for _, other in self._connections.values()):
            self._drop(peer)

    def _drop(self, peer: bytes) -> None:
        sharing = self.sharings.pop(peer, None)
        if sharing is not None:
            sharing.close()


class MemoryCaller:
    """The connecting end: `done` gets the sharing, in a thread that ends then."""

    def __init__(
        self, name: str, identity: bytes, memory: SharedMemory, done: Callable[[Sharing], None]
    ) -> None:
        self._words = name, identity, memory
        self._done = done
        self._lock = threading.Lock()  # Guards the two below.
        self._closed = False
        self._connection: socket.socket | None = None
        threading.Thread(target=self._run, name="hvdlite ps memory call", daemon=True).start()

    def _run(self) -> None:
        try:
            connection = _connect(self._words[0])
            with self._lock:
                self._connection = connection
                if self._closed:
                    _end(connection)
            sharing = self._greet(connection)
        except (OSError, ProtocolError):  # Payloads go through the socket then.
            self.close()
        else:
            self._done(sharing)

    def _greet(self, connection: socket.socket) -> Sharing:
        _, identity, memory = self._words
        check_credentials(connection)
        connection.settimeout(MEET_SECONDS)
        session = int.from_bytes(os.urandom(7), "little")
        _send(connection, session, identity, memory)
        said, _, window = _receive(connection)
        if said != session:
            window.close()
            raise ProtocolError(f"a server answers to the session {said}, not {session}")
        return Sharing(session, memory, window)

    def close(self) -> None:
        """End the connection, by which the other side sees that nothing is read here any more."""
        with self._lock:
            self._closed = True
            if self._connection is not None:
                _end(self._connection)


def _end(connection: socket.socket) -> None:
    """Close a connection. Without a shutdown it would stay open while a thread reads it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


def is_here(name: str) -> bool:
    """Return whether the process with this name is on this host, and can be reached."""
    try:
        _connect(name).close()
    except OSError:
        return False
    return True


def _connect(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(MEET_SECONDS)
        connection.connect(_path(name))
    except BaseException:
        connection.close()
        raise
    return connection


def _send(connection: socket.socket, session: int, name: bytes, memory: SharedMemory) -> None:
    socket.send_fds(connection, [HELLO.pack(MAGIC, session) + name], [memory.descriptor])


def _receive(connection: socket.socket) -> tuple[int, bytes, Window]:
    data, descriptors, *_ = socket.recv_fds(connection, MOST_HELLO_BYTES, 1)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    if len(data) < HELLO.size or len(descriptors) != 1 or not data.startswith(MAGIC):
        for descriptor in descriptors:
            os.close(descriptor)
        raise ProtocolError(f"a stranger has come for the memory of a server: {data[:16]!r}")
    _, session = HELLO.unpack_from(data)
    try:
        return session, data[HELLO.size :], Window(descriptors[0])
    except ProtocolError:
        os.close(descriptors[0])
        raise
