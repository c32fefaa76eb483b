"""How the two ends of a Unix socket hand each other their memory, when both have proved themselves.

Each end sends a few bytes with two descriptors, and takes those of the other end; what follows are
messages. One is that of its memory. The other is the end of a pipe, which the other end keeps as
long as it looks at that memory: when it is closed there, by whatever end of that process, what was
lent is free again. Both ends are on the same host, and processes of the same user.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.strangers import Stranger, check_credentials
from hvdlite.ps.connections.messages import Buffer, Message
from hvdlite.ps.connections.shared_memory import (
    SHARED_BYTES,
    Descriptor,
    Place,
    SharedMemory,
    Window,
)

# What two processes of one host know of each other's memory; see [Note: shared payloads].
#
# This module never sends, sleeps or reads a clock.


NOTE = "memory"  # The word in the body of a message that says where its payloads lie.
MAGIC = b"hvdlips3"
SWAP_SECONDS = 60.0  # The other end may be busy.


class Sharing:
    """Both directions of one connection between this process and a peer."""

    def __init__(self, own: SharedMemory, theirs: Window) -> None:
        self._own, self._theirs = own, theirs
        self._sent = 0  # How many messages with places were sent.
        self._lent: dict[int, list[Buffer]] = {}  # By the number of their message.
        self._seen = 0  # The highest number of a message with places that has come.
        self._held: dict[int, int] = {}  # The number of such a message -> its views that are left.
        self._released: deque[int] = deque()  # May be appended to while any other code runs.

    def pack(self, message: Message) -> Message:
        """Return the message as it is sent: payloads that lie in shared memory are places."""
        places: list[Place | None] = []
        frames: list[Buffer] = []
        lent: list[Buffer] = []
        for payload in message.payloads:
            place = None
            if isinstance(payload, memoryview) and payload.nbytes >= SHARED_BYTES:
                place = self._own.find(payload)
            places.append(place)
            (frames if place is None else lent).append(payload)
        if not lent and not self._seen:
            return message
        number = 0
        if lent:
            self._sent = number = self._sent + 1
            self._lent[number] = lent
        while self._released:
            released = self._released.popleft()
            self._held[released] -= 1
            if not self._held[released]:
                del self._held[released]
        note = [number, self._seen, list(self._held), places]
        return message._replace(body={**message.body, NOTE: note}, payloads=frames)

    def unpack(self, message: Message) -> Message:
        """Return the message with its payloads. Raises ProtocolError for places that are none."""
        if NOTE not in message.body:
            return message
        body = dict(message.body)
        try:
            number, seen, held, places = body.pop(NOTE)
            for old in [each for each in self._lent if each <= seen and each not in held]:
                del self._lent[old]
            frames = iter(message.payloads)
            payloads: list[Any] = [
                next(frames) if place is None else self._look(number, place) for place in places
            ]
        except (TypeError, ValueError, StopIteration) as error:
            raise ProtocolError(f"a message says wrongly where its payloads lie: {error}") from None
        if number:
            self._seen = max(self._seen, number)
        return message._replace(body=body, payloads=tuple(payloads))

    @property
    def lent(self) -> int:
        """The number of messages whose payloads the peer may still look at."""
        return len(self._lent)

    def close(self) -> None:
        """Say no more to the peer, which may still look at what was lent to it."""
        self._theirs.close()

    def let_go(self) -> None:
        """Take note that the peer looks at nothing any more."""
        self._lent = {}  # Another one, as another thread may go through the old one.

    def _look(self, number: int, place: Place) -> memoryview:
        root = np.frombuffer(self._theirs.view(place), np.uint8)
        self._held[number] = self._held.get(number, 0) + 1
        weakref.finalize(root, self._released.append, number).atexit = False
        return root.data


def is_here(name: str) -> bool:
    """Return whether the process with this name is on this host, and of this user."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.setblocking(False)
            if connection.connect_ex(f"\0{name}") != 0:
                return False
            check_credentials(connection)  # Else it would refuse this process, and TCP goes.
            return True
    except (OSError, ProtocolError):  # An OSError without a free descriptor.
        return False


def swap(
    loop: Loop, connection: socket.socket, memory: SharedMemory,
    done: Callable[[Sharing], None], failed: Callable[[str], None] = lambda why: None,
) -> Callable[[], None]:  # fmt: skip
    """Hand over the own memory for that of the other end; where that fails, close.

    What is returned gives it up.
    """
    stranger = Stranger(
        loop, connection, lambda error: failed(f"its memory does not come: {error}")
    )

    def take(_events: int) -> None:
        try:
            window = _receive(connection)
        except BlockingIOError:
            return
        except (OSError, ProtocolError) as error:
            stranger.fail(error)
            return
        stranger.release()
        done(_shared(loop, memory, window, loan))

    try:
        check_credentials(connection)
        loan, held = map(Descriptor, os.pipe())
        socket.send_fds(connection, [MAGIC], [memory.descriptor, held.number])
    except (OSError, ProtocolError) as error:
        stranger.fail(error)
    else:
        loop.watch(connection.fileno(), READ, take)
        loop.call_after(SWAP_SECONDS, lambda: stranger.fail(TimeoutError("it is silent")))
    return stranger.close


def _shared(loop: Loop, memory: SharedMemory, window: Window, loan: Descriptor) -> Sharing:
    """Return what both ends share; what was lent is let go when the other end's pipe is closed."""
    sharing = Sharing(memory, window)

    def end(_events: int) -> None:
        loop.forget(loan.number)
        sharing.let_go()

    loop.watch(loan.number, READ, end)
    return sharing


def _receive(connection: socket.socket) -> Window:
    data, numbers, *_ = socket.recv_fds(connection, len(MAGIC), 2)
    for number in numbers:
        os.set_inheritable(number, False)
    descriptors = [*map(Descriptor, numbers)]
    if data != MAGIC or len(descriptors) != 2:
        raise ProtocolError(f"it says {data!r} with {len(descriptors)} descriptors")
    return Window(*descriptors)
