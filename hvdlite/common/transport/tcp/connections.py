"""All connections of a rank while they are made: those it dials, and those that come in.

Nothing here waits: all steps are handlers of the poller, also when a program that is none of ours
connects, says nothing, or something else.
"""

from __future__ import annotations

import logging
import socket
import struct
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.address import Target
from hvdlite.common.connections.dial import Limits
from hvdlite.common.connections.loop import READ, Loop
from hvdlite.common.connections.strangers import check_credentials
from hvdlite.common.meeting import handshake
from hvdlite.common.meeting.handshake import NONCE_BYTES, PROOF_BYTES
from hvdlite.common.transport.tcp.dials import Dial
from hvdlite.common.transport.tcp.strangers import (
    CLAIM,
    CONTROL_ONE_WAY,
    GO,
    MOST_STREAMS,
    Identity,
    OtherEpochError,
    Slot,
    Stranger,
)

log = logging.getLogger("hvdlite")

HANDSHAKE_SECONDS = 30.0  # How long one that does not prove who it is may stay connected.
# How many may be connected that have not proved who they are, beside all ranks of the job, which
# may dial all their connections at once. The oldest is closed when another one comes.
MOST_STRANGERS = 512
CONNECTIONS_PER_RANK = 2 + MOST_STREAMS  # Control in both ways, and arrays.
LINGER = struct.Struct("ii")
PAUSE_SECONDS = 1.0  # Without descriptors left, a rank accepts again after this time.


class Owner(Protocol):
    """Who uses the connections when they are made."""

    def on_connected(self, slot: Slot, connection: socket.socket, *, dialled: bool) -> None:
        """Use `connection`, whose other end has proved to be `slot.rank`."""

    def on_unreachable(self, slot: Slot, reasons: str) -> None:
        """Note that the rank cannot be dialled, for `reasons`."""


class Connections:
    """The listeners of a rank, its guests (who connect here) and its dials."""

    def __init__(
        self,
        poller: Loop,
        me: Identity,
        listeners: Sequence[socket.socket],
        targets: Callable[[int], Sequence[Target]],
        limits: Limits,
    ) -> None:
        """`targets` gives where to try to reach a rank, in order."""
        self.owner: Owner
        # Is told the rank when the connection for which `entering` was true is closed.
        self.not_entered: Callable[[int], None]
        self.me = me
        self._poller = poller
        self._listeners = listeners
        self._targets = targets
        self._limits = limits
        self._guests: dict[_Guest, None] = {}  # In the order in which they came.
        self._dials: set[Dial] = set()
        self._reached: dict[int, Target] = {}  # Where a rank has answered before.
        self._taken: set[Slot] = set()  # Connections that were accepted.
        self._listen()

    # -- dials

    def dial(self, slot: Slot) -> None:
        """Begin to connect to a rank, first where it has answered before."""
        targets = list(self._targets(slot.rank))
        if slot.rank in self._reached:
            targets.sort(key=lambda target: target != self._reached[slot.rank])
        dial = Dial(self._poller, self.me, slot, targets, self._limits)
        dial.connected, dial.failed = self._on_connected, self._on_failed
        self._dials.add(dial)
        dial.start()

    def _on_connected(self, dial: Dial, connection: socket.socket, target: Target) -> None:
        self._dials.discard(dial)
        self._reached[dial.slot.rank] = target
        self.owner.on_connected(dial.slot, connection, dialled=True)

    def _on_failed(self, dial: Dial, reasons: str) -> None:
        self._dials.discard(dial)
        self.owner.on_unreachable(dial.slot, reasons)

    # -- guests

    def _listen(self) -> None:
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._poller.watch(listener.fileno(), READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, events: int) -> None:
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, ConnectionError):
            return
        except OSError as error:  # Too many open files: do not ask again and again.
            log.warning("rank %d cannot accept a connection: %s", self.me.rank, error)
            for each in self._listeners:
                self._poller.forget(each.fileno())
            self._poller.call_at(time.monotonic() + PAUSE_SECONDS, self._listen)
            return
        connection.setblocking(False)
        if len(self._guests) >= MOST_STRANGERS + self.me.size * CONNECTIONS_PER_RANK:
            next(iter(self._guests)).push_out()
        guest = _Guest(self, self._poller, connection)
        self._guests[guest] = None
        guest.greet()

    def forget(self, guest: _Guest) -> None:
        """Drop a guest that has closed, or that was let in."""
        self._guests.pop(guest, None)

    def drop(self, guest: _Guest) -> None:
        """Forget a guest that has closed; `not_entered` may have waited for it."""
        self.forget(guest)
        if guest.slot is not None and guest.slot.channel == CONTROL_ONE_WAY:
            self.not_entered(guest.slot.rank)

    def entering(self, rank: int) -> bool:
        """Return whether a guest that is to bring messages of `rank` has not entered yet."""
        slot = Slot(rank, CONTROL_ONE_WAY)
        return any(guest.slot == slot for guest in self._guests)

    def may_enter(self, slot: Slot) -> bool:
        """Return whether a connection is not there yet."""
        return slot not in self._taken

    def enter(self, guest: _Guest, slot: Slot) -> None:
        """Let a guest in that has proved who it is."""
        self._taken.add(slot)
        self.forget(guest)
        self.owner.on_connected(slot, guest.release(), dialled=False)

    # -- closing

    def close(self) -> None:
        """Close the listeners, and all that is not connected yet."""
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._poller.forget(listener.fileno())
                listener.close()
        for dial in self._dials:
            dial.cancel()
        for guest in list(self._guests):
            guest.close()
        self._dials.clear()
        self._guests.clear()


class _Guest(Stranger):
    """One that connects here: it is sent a nonce, and has to prove who it is."""

    def __init__(self, host: Connections, poller: Loop, connection: socket.socket) -> None:
        super().__init__(poller, connection)
        self._host = host
        self._nonce = handshake.new_nonce()
        self.slot: Slot | None = None
        poller.call_at(time.monotonic() + HANDSHAKE_SECONDS, self._limit)

    def greet(self) -> None:
        """Send the nonce, unless another user of this host connects."""
        try:
            if self.connection.family == socket.AF_UNIX:
                check_credentials(self.connection)
        except ProtocolError as error:
            log.warning("rank %d: %s", self._host.me.rank, error)
            self.ended(str(error))
            return
        if self.say(self._nonce):
            self.expect(NONCE_BYTES + CLAIM.size + PROOF_BYTES, self._on_claim)

    def _on_claim(self, body: bytes) -> None:
        me = self._host.me
        nonces, rest = self._nonce + body[:NONCE_BYTES], body[NONCE_BYTES:]
        claim, given = rest[: CLAIM.size], rest[CLAIM.size :]
        if not handshake.proves(given, me.key, handshake.CONNECTS, nonces, claim):
            self.ended("it does not know the secret of this job")
            return
        try:
            self.slot = me.read(claim)
        except ProtocolError as error:
            if isinstance(error, OtherEpochError):
                log.warning("%s: the connection is closed", error)
            self.ended(str(error))
            return
        if not self._host.may_enter(self.slot):
            self.ended("it is connected already")
        elif self.say(handshake.proof(me.key, handshake.LISTENS, nonces, claim)):
            self.expect(len(GO), self._on_go)

    def _on_go(self, body: bytes) -> None:
        if body == GO and self.slot is not None and self._host.may_enter(self.slot):
            self._host.enter(self, self.slot)
        else:
            self.ended("it says what no rank says")

    def push_out(self) -> None:
        """Close the connection to make room. A reset tells a rank that it may try again."""
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, LINGER.pack(1, 0))
        self.ended("there are too many")

    def _limit(self) -> None:
        if self.pending:
            self.ended("it did not prove who it is")

    def ended(self, reason: str, *, reset: bool = False) -> None:
        """See `Stranger.ended`."""
        log.debug("rank %d closes a foreign connection: %s", self._host.me.rank, reason)
        self.close()
        self._host.drop(self)
