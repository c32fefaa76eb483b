"""A link: messages, with large arrays, over a connection on which both ends are known.

Three words for an end: `close` ends a link at once, and nobody is called; `finish` ends what this
end says, once all that was queued has gone; and a link *has ended* when the other end has closed
or finished, or is gone: `ended` is called once, with the reason.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import termios
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.frames import (
    BEAT,
    MOST_ARRAYS,
    Buffer,
    Frames,
    Memory,
    frame,
    no_memory,
    pack,
    unpack,
)
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import READ, WRITE, Loop, readable

READ_BYTES = 1 << 16
MOST_PARTS = 64  # Of one system call.

Arrays = Sequence[bytearray | memoryview]


def _ignore(*_: object) -> None:
    """Do nothing."""


def _spell(error: OSError) -> str:
    """Return what an error of a connection says, without its number."""
    return os.strerror(error.errno).lower() if error.errno else str(error)


class Pipes:
    """Two descriptors, one to read and one to write, with the methods of a socket."""

    family = socket.AF_UNIX

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self.writes = reads, writes

    def fileno(self) -> int:
        """Return the descriptor that is read."""
        return self._reads

    def setblocking(self, flag: bool) -> None:
        """Make both block, or not."""
        for descriptor in (self._reads, self.writes):
            os.set_blocking(descriptor, flag)

    def recv(self, count: int) -> bytes:
        """Return at most `count` bytes; none at the end."""
        return os.read(self._reads, count)

    def recvmsg_into(self, buffers: list[memoryview]) -> tuple[int]:
        """Fill `buffers` in order; return how many bytes came, none at the end."""
        return (os.readv(self._reads, buffers),)

    def send(self, data: Buffer, flags: int) -> int:
        """Write some of `data`; return how much."""
        return os.write(self.writes, data)

    def sendmsg(self, parts: list[Buffer], ancillary: tuple[()], flags: int) -> int:
        """Write some of `parts`; return how many bytes."""
        return os.writev(self.writes, parts)

    def shutdown(self, how: int) -> None:
        """Let the other end read the end of what was written."""
        if self.writes < 0:
            return
        if stat.S_ISSOCK(os.fstat(self.writes).st_mode):
            # The descriptor that is read keeps the connection: the other end would not notice.
            with (
                socket.socket(fileno=os.dup(self.writes)) as connection,
                contextlib.suppress(OSError),
            ):
                connection.shutdown(how)
        os.close(self.writes)
        self.writes = -1

    def close(self) -> None:
        if self.writes >= 0:
            os.close(self.writes)
            self.writes = -1
        os.close(self._reads)


class Link:
    """One end of a link; the loop's thread owns it, and any thread may `send`.

    `connection` is a connected socket, or `Pipes`; it belongs to the link. ``received(message,
    arrays)`` is called in the loop with each message; a `ProtocolError` from it ends the link.
    ``ended(reason)`` is called once in the loop, after the link was closed; an orderly end has an
    empty reason. `most_bytes` bounds the heads that are accepted, and `memory` says where arrays
    are received (by default there are none), at most `most_arrays` with a message.

    With `beat_seconds` this end sends a beat whenever it has said nothing for that long. `prologue`
    is what is looked for, and skipped with all before it, in what comes.
    """

    def __init__(
        self,
        loop: Loop,
        connection: socket.socket | Pipes,
        *,
        received: Callable[[Any, Arrays], None],
        ended: Callable[[str], None],
        most_bytes: int,
        memory: Memory = no_memory,
        unpacker: Callable[[bytes], Any] = unpack,
        most_arrays: int = MOST_ARRAYS,
        beat_seconds: float = 0.0,
        prologue: bytes = b"",
        liveness: Liveness | None = None,
    ) -> None:
        self.received, self.ended = received, ended
        self.frames = Frames(most_bytes, memory, unpacker, most_arrays)
        self.open = True
        self.at_fault = False  # Whether the other end has said what it must not.
        self.gathers = False  # Whether what is sent waits for `flush`, to go with what follows.
        self.spoke_at, self._heard_at = loop.now(), loop.awake_seconds()
        self._loop, self._liveness = loop, liveness
        self._beat_seconds = beat_seconds
        self._prologue, self._skipped = prologue, b""
        # Guards all that is about sending. Reentrant, as signal handlers may send.
        self._lock = threading.RLock()
        self._outbox: deque[Buffer] = deque()
        self._queued = self._sent = 0  # Bytes, since the beginning.
        self._marks: deque[tuple[int, Callable[[], None]]] = deque()  # By bytes that were sent.
        self._flushing = False
        self._finishing = False
        self._broken = False  # Nobody reads what this end sends.
        self._reason = ""  # Why it is broken.
        self._events = 0
        self._connection = connection
        self._reads, self._writes = connection.fileno(), connection.fileno()
        if isinstance(connection, Pipes):
            self._writes = connection.writes
        connection.setblocking(False)
        self._watch()
        if beat_seconds:
            loop.call_after(beat_seconds, self._beat)

    # -- sending

    def send(self, *message: Any) -> None:
        """Send a message, its kind first, now or when there is room; after the end, do nothing."""
        self.send_head(pack(message))

    def send_head(
        self, head: bytes, arrays: Sequence[Buffer] = (), sent: Callable[[], None] | None = None
    ) -> None:
        """Send a packed message and arrays, straight from their memory.

        The arrays are not copied, and must not change until ``sent()`` is called, in the loop:
        their bytes have gone, or never will.
        """
        self.send_bytes(frame(head, arrays), *arrays, sent=sent)

    def send_bytes(self, *parts: Buffer, sent: Callable[[], None] | None = None) -> None:
        """Send bytes that need not be a message, such as a prologue; `sent` as in `send_head`."""
        with self._lock:
            if not self.says:
                if sent is not None:
                    self._loop.post(sent)
                return
            self.spoke_at = self._loop.now()
            views = [p if isinstance(p, bytes) else memoryview(p).cast("B") for p in parts]
            data = [view for view in views if len(view)]
            size = sum(map(len, data))
            # A signal handler may send a message of its own between any two statements: all parts
            # are queued at once, and counted before, so that no mark comes too early.
            self._queued += size
            self._outbox.extend(data)
            if sent is not None:
                self._marks.append((self._queued, sent))
            if not self.gathers and not self._events & WRITE:
                self._flush()

    def flush(self) -> None:
        with self._lock:
            if self._outbox and not self._events & WRITE:
                self._flush()

    @property
    def says(self) -> bool:
        """Whether what is sent will still go."""
        return self.open and not self._finishing and not self._broken

    @property
    def queued_bytes(self) -> int:
        """How much the other end has not taken yet."""
        return self._queued - self._sent

    @property
    def unconfirmed_bytes(self) -> int:
        """How much, of what has gone over a socket, the other end's kernel has not confirmed."""
        if not self.open:
            return 0
        return int.from_bytes(fcntl.ioctl(self._writes, termios.TIOCOUTQ, bytes(4)), "little")

    def _flush(self) -> None:
        """Send what fits, and have the rest sent when there is room. The lock is held."""
        if self._flushing:  # By what a signal has interrupted, which goes on.
            return
        self._flushing = True
        try:
            while self._outbox:
                self._write()
        except BlockingIOError:
            pass
        except OSError as error:  # Reading tells of the end, but not why: this takes the reason.
            self._broken = True
            self._reason = _spell(error)
            self._outbox.clear()
            self._sent = self._queued
        finally:
            self._flushing = False
        while self._marks and self._marks[0][0] <= self._sent:
            self._loop.post(self._marks.popleft()[1])
        if self._liveness is not None and isinstance(self._connection, socket.socket):
            self._liveness.watch(self._connection, lambda error: self._end(str(error)))
        if self._finishing and not self._outbox:
            if self._reads != self._writes:
                self._loop.forget(self._writes)
            with contextlib.suppress(OSError):
                self._connection.shutdown(socket.SHUT_WR)
            # Pipes have closed the descriptor that was written: it may be another link's soon.
            self._writes = self._reads
        self._watch()

    def _write(self) -> None:
        """Send some of what is queued, and drop it."""
        outbox = self._outbox
        if len(outbox) == 1:
            count = self._connection.send(outbox[0], socket.MSG_NOSIGNAL)
        else:
            # A signal handler may add messages meanwhile, which an iterator does not survive.
            parts = [outbox[number] for number in range(min(len(outbox), MOST_PARTS))]
            count = self._connection.sendmsg(parts, (), socket.MSG_NOSIGNAL)
        self._sent += count
        while count:
            part = outbox[0]
            if count < len(part):
                outbox[0] = memoryview(part)[count:]
                return
            count -= len(part)
            outbox.popleft()

    # -- receiving

    def _watch(self) -> None:
        """Watch for what comes, and for room while something is queued."""
        if not self.open:
            return
        room = WRITE if self._outbox else 0
        if self._events == READ | room:
            return
        self._events = READ | room
        if self._reads == self._writes:
            self._loop.watch(self._reads, READ | room, self._on_ready)
            return
        self._loop.watch(self._reads, READ, self._on_ready)
        if room:
            self._loop.watch(self._writes, WRITE, self._on_room)
        else:
            self._loop.forget(self._writes)

    def _on_ready(self, events: int) -> None:
        if events & WRITE:
            self._on_room(events)
        if events & ~WRITE and self.open:
            self._read()
            # What an encrypted connection has read ahead makes no event.
            while self.open and getattr(self._connection, "pending", int)():
                self._read()

    def _on_room(self, _events: int) -> None:
        with self._lock:
            if self.open:
                self._flush()

    def _read(self) -> None:
        frames = self.frames
        try:
            if frames.due:
                count = self._connection.recvmsg_into(frames.due[:MOST_PARTS])[0]
                messages = frames.filled(count) if count else None
            else:
                data = self._connection.recv(READ_BYTES)
                messages = frames.add(self._after_prologue(data)) if data else None
        except BlockingIOError:
            return
        except OSError as error:
            self._end(_spell(error))
            return
        if messages is None:
            within = "" if frames.between else "it ended in the middle of a message"
            self._end(self._reason or within)
            return
        self._heard_at = self._loop.awake_seconds()
        try:
            for message, arrays in messages:
                self.received(message, arrays)
                if not self.open:
                    return
        except ProtocolError as error:
            self.at_fault = True
            self._end(str(error))

    def _after_prologue(self, data: bytes) -> bytes:
        if not self._prologue:
            return data
        self._skipped += data
        _, found, rest = self._skipped.partition(self._prologue)
        if found:
            self._prologue = self._skipped = b""
            return rest
        self._skipped = self._skipped[-len(self._prologue) :]
        return b""

    def read_all(self) -> None:
        """Take all that waits to be read, and the end; called in the loop."""
        while self.has_input():
            self._read()

    # -- watching

    def silent_for(self) -> float:
        """Return for how many seconds nothing has come, of those in which the loop was awake."""
        return self._loop.awake_seconds() - self._heard_at

    def has_input(self) -> bool:
        """Return whether something waits to be read."""
        return self.open and readable(self._reads)

    def _beat(self) -> None:
        if not self.open or self._finishing:
            return
        left = self.spoke_at + self._beat_seconds - self._loop.now()
        if left <= 0:
            if not self._outbox:  # What waits shows as much.
                self.send_bytes(BEAT)
            left = self._beat_seconds
        self._loop.call_after(left, self._beat)

    # -- ends

    def finish(self) -> None:
        """Say no more once all is sent; messages are received until the other end has closed."""
        with self._lock:
            if self.open and not self._finishing:
                self._finishing = True
                self._flush()

    def leave(self, seconds: float) -> None:
        """Finish, receive nothing, and close when the other end does, or after `seconds`.

        A connection that is closed with something unread would take back what was sent last.
        """
        self.received = self.ended = _ignore
        self.finish()
        self._loop.call_after(seconds, self.close)

    def _end(self, reason: str) -> None:
        if self.open:
            self.close()
            self.ended(reason)

    def close(self) -> None:
        """Close the connection at once; idempotent."""
        with self._lock:
            if not self.open:
                return
            self.open = False
            self._outbox.clear()
            self._sent = self._queued
            for _, sent in self._marks:
                self._loop.post(sent)
            self._marks.clear()
            for descriptor in {self._reads, self._writes}:
                self._loop.forget(descriptor)
            self._connection.close()

    def close_after_fork(self) -> None:
        """Close a child's copy of the connection; a thread that it lacks may hold the lock."""
        self.open = False
        self._connection.close()
