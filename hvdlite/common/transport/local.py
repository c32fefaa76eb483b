"""The connections between the ranks of one host: Unix sockets, and memory that they share.

Nothing here spins: a rank that waits sleeps in epoll. Control messages and the signals of the data
plane have sockets of their own and never mix.

The memory is a memfd of each rank, which its peers map, too. It begins with SHORT_CALL_BYTES for
short calls, which are there from the start; what follows grows.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import HorovodInternalError, ProtocolError
from hvdlite.common.connections.loop import READ, WRITE, Loop
from hvdlite.common.transport.base import CHECK_SECONDS, SHORT_CALL_BYTES, Incoming, connection_lost
from hvdlite.common.transport.framing import FRAME_BYTES, Assembler, frames
from hvdlite.common.transport.rendezvous import Peer
from hvdlite.common.transport.wakeup import WakeUp

TOKEN = b"t"


class LocalMesh:
    """The connections of `rank` to the other ranks of its host.

    All that it waits for is in `poller`, beside what others watch there: messages go to `incoming`
    until `receive` takes them. `woken` stays true from `wake` until its owner resets it, and `news`
    does, too: it tells waits of the data plane of a wake once.
    """

    def __init__(
        self, rank: int, peers: dict[int, Peer], memory: int, poller: Loop | None = None
    ) -> None:
        self.poller = poller or Loop()
        self.incoming: list[Incoming] = []
        self.woken = self.news = False
        self._rank = rank
        self._links = {peer: _Link(peer, connections) for peer, connections in peers.items()}
        self._memory = {rank: Memory(rank, memory)}
        self._memory |= {peer: Memory(peer, links.memory) for peer, links in peers.items()}
        self._wake_up = WakeUp()
        self.wake = self._wake_up.trigger  # See `Transport.wake`. After `close` it has no effect.
        for descriptor in self._wake_up.descriptors:
            self.poller.watch(descriptor, READ, self._on_wake)
        for link in self._links.values():
            self.poller.watch(link.control.fileno(), READ, partial(self._on_control, link))

    # -- control messages

    def send(self, rank: int, body: bytes) -> None:
        """Queue `body` for `rank`; frames that the socket does not accept are sent later."""
        link = self._links[rank]
        if not link.control_lost:
            link.outbox.extend(frames(body))
            self._flush(link)

    def receive(self, timeout: float | None) -> list[Incoming]:
        """Sleep once for at most `timeout` seconds (None: no limit), and return all messages."""
        self.poller.run_once(timeout)
        return self.take()

    def take(self) -> list[Incoming]:
        messages = self.incoming.copy()
        self.incoming.clear()
        return messages

    def pop_news(self) -> bool:
        """Return whether messages wait, or a wake that a wait has not been told of."""
        news, self.news = self.news, False
        return news or bool(self.incoming)

    def _on_wake(self, events: int) -> None:
        self.woken = self.news = True
        self._wake_up.clear()

    def _on_control(self, link: _Link, events: int) -> None:
        if events & WRITE:
            self._flush(link)
        if events & ~WRITE:
            self._read(link)

    def _read(self, link: _Link) -> None:
        while True:
            try:
                frame = link.control.recv(FRAME_BYTES + 1)
            except BlockingIOError:
                return
            except ConnectionResetError:
                # The peer closed with messages of ours unread. The kernel reports that once, before
                # the messages that the peer has sent itself.
                continue
            except OSError:
                frame = b""
            if not frame:  # The peer has closed its end, or its process is gone.
                link.control_lost = True
                link.outbox.clear()
                self.poller.forget(link.control.fileno())
                self.incoming.append(Incoming(link.rank, None))
                return
            body = link.assembler.add(frame)
            if body is not None:
                self.incoming.append(Incoming(link.rank, body))

    def _flush(self, link: _Link) -> None:
        link.flush()
        if not link.control_lost and link.waits_for_room != bool(link.outbox):
            link.waits_for_room = bool(link.outbox)
            room = WRITE if link.waits_for_room else 0
            self.poller.watch(link.control.fileno(), READ | room, partial(self._on_control, link))

    # -- data plane

    def shared(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        return self._memory[rank].view(nbytes, grow=rank == self._rank)

    def short_call_memory(self, rank: int) -> NDArray[np.uint8]:
        return self._memory[rank].head()

    def signal(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            link = self._links[rank]
            link.owed_tokens += 1
            link.send_owed_tokens()

    def await_signal(
        self,
        rank: int,
        while_waiting: Callable[[], None],
        interval: float = CHECK_SECONDS,
        attend: Callable[[], None] | None = None,
    ) -> None:
        """See `Transport.await_signal`. Call `while_waiting` every `interval` seconds meanwhile.

        `attend` is called whenever something occurs in `poller`; None leaves that for later.
        """
        link = self._links[rank]
        while not link.pop_token():
            owes = any(other.outbox or other.owed_tokens for other in self._links.values())
            poll = link.signal_poll
            if owes:  # Wait for room in sockets with queued data, too.
                poll = select.poll()
                poll.register(link.signal, select.POLLIN)
                for other in self._links.values():
                    if other.outbox and not other.control_lost:
                        poll.register(other.control, select.POLLOUT)
                    if other.owed_tokens:
                        events = select.POLLOUT | (select.POLLIN if other is link else 0)
                        poll.register(other.signal, events)
            if attend is not None:
                poll.register(self.poller, select.POLLIN)
            ready = poll.poll(interval * 1000)
            if not ready:
                while_waiting()
            elif attend is not None and any(fd == self.poller.fileno() for fd, _ in ready):
                attend()
            if owes:
                for other in self._links.values():
                    other.send_owed_tokens()
                    self._flush(other)

    def gone(self, rank: int) -> bool:
        """See `Transport.gone`. False for ranks of other hosts."""
        return rank in self._links and self._links[rank].closed_by_peer()

    # -- closing

    def drain(self, timeout: float) -> None:
        """Send all queued messages; give up after `timeout` seconds without progress."""
        while any(link.outbox for link in self._links.values()):
            poll = select.poll()
            for link in self._links.values():
                if link.outbox:
                    poll.register(link.control, select.POLLOUT)
            if not poll.poll(timeout * 1000):
                return
            for link in self._links.values():
                self._flush(link)

    def close(self) -> None:
        """Close this process's ends of the connections; peers see that they are closed."""
        self._close_connections()
        self._wake_up.close()

    def _close_connections(self) -> None:
        self.poller.close()
        for link in self._links.values():
            link.control.close()
            link.signal.close()
        for memory in self._memory.values():
            memory.close()

    def after_fork_in_child(self) -> None:
        self._close_connections()
        self._wake_up.after_fork_in_child()


class _Link:
    """Both connections to one peer."""

    def __init__(self, rank: int, peer: Peer) -> None:
        self.rank = rank
        self.control, self.signal = peer.control, peer.signal
        self.signal_poll = select.poll()
        self.signal_poll.register(self.signal, select.POLLIN)
        self.assembler = Assembler(rank)
        self.outbox: deque[bytes] = deque()  # Frames that the socket has not accepted yet.
        self.owed_tokens = 0  # Tokens that the socket has not accepted yet.
        self.control_lost = False  # Set when the peer has closed its end of `control`.
        self.waits_for_room = False  # Whether the poller waits for room in `control`.

    def flush(self) -> None:
        """Send frames until the socket accepts no more. A lost peer is noticed when reading."""
        try:
            while self.outbox:
                self.control.send(self.outbox[0], socket.MSG_NOSIGNAL)
                self.outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self.outbox.clear()

    def send_owed_tokens(self) -> None:
        """Send tokens until the socket accepts no more."""
        try:
            while self.owed_tokens:
                self.signal.send(TOKEN, socket.MSG_NOSIGNAL)
                self.owed_tokens -= 1
        except BlockingIOError:
            return
        except OSError:
            self.owed_tokens = 0

    def pop_token(self) -> bool:
        """Remove one token; return whether there was one.

        Raises `PeerLostError` and `ProtocolError`.
        """
        try:
            data = self.signal.recv(len(TOKEN) + 1)
        except BlockingIOError:
            return False
        except ConnectionResetError:  # Reported once, as in `LocalMesh._read`.
            return self.pop_token()
        except OSError as error:
            raise connection_lost(self.rank) from error
        if not data:
            raise connection_lost(self.rank)
        if data != TOKEN:
            raise ProtocolError(f"rank {self.rank} sent a foreign signal: {data!r}", self.rank)
        return True

    def closed_by_peer(self) -> bool:
        """Return whether the peer has closed its end and nothing is left to read."""
        try:
            return not self.signal.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionResetError:
            return self.closed_by_peer()
        except OSError:
            return True


class Memory:
    """The memfd of one rank and its mapping in this process. Views keep their mapping alive."""

    def __init__(self, rank: int, descriptor: int) -> None:
        self._rank = rank
        self._descriptor = descriptor
        self._mapping: mmap.mmap | None = None  # None until the first view.
        self._mapped: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def view(self, nbytes: int, *, grow: bool) -> NDArray[np.uint8]:
        """Return `nbytes` bytes behind the head; only the owner may `grow` the memory."""
        nbytes += SHORT_CALL_BYTES
        if self._mapped.size < nbytes:
            size = os.fstat(self._descriptor).st_size
            if size < nbytes:
                if not grow:
                    raise ProtocolError(
                        f"rank {self._rank} shares {size} bytes of memory, not {nbytes}", self._rank
                    )
                size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
                _allocate(self._descriptor, size, f"rank {self._rank}")
            self._mapping = mmap.mmap(self._descriptor, size)
            self._mapped = np.frombuffer(self._mapping, np.uint8)
        return self._mapped[SHORT_CALL_BYTES:nbytes]

    def head(self) -> NDArray[np.uint8]:
        """Return the bytes for short calls, in a mapping of their own."""
        mapping = mmap.mmap(self._descriptor, SHORT_CALL_BYTES)
        return np.frombuffer(mapping, np.uint8)

    def close(self) -> None:
        """Close the descriptor, and unmap the memory, now or with the last view of it."""
        if self._descriptor < 0:  # Closed before: a forked child closes what its parent has closed.
            return
        os.close(self._descriptor)
        self._descriptor = -1
        self._mapped = np.zeros(0, np.uint8)
        if self._mapping is not None:
            with contextlib.suppress(BufferError):  # A view is in use, and keeps the mapping.
                self._mapping.close()
            self._mapping = None


def create_memory() -> int:
    """Create a memfd with a head of zeros. Raises `OSError`, `HorovodInternalError`."""
    descriptor = os.memfd_create("hvdlite", os.MFD_CLOEXEC)
    try:
        _allocate(descriptor, SHORT_CALL_BYTES, "this process")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _allocate(descriptor: int, size: int, owner: str) -> None:
    """Give a file `size` bytes: a full memory would else raise SIGBUS at the first access."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise HorovodInternalError(
            f"{owner} cannot have {size} bytes of shared memory: {error}"
        ) from error
