"""All connections of a rank while they are made: those it dials, and those that come in.

A rank proves which connection between which ranks of which world it means; see connections/prove.py
for the proof. Nothing here waits: all steps are handlers of the loop, also when a program that is
none of ours connects, says nothing, or something else.
"""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.connections.address import Target
from hvdlite.common.connections.dial import Dial, Failure, Limits
from hvdlite.common.connections.listener import Listener, Refusal
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.prove import FIRST_OWN, Claim, Party

BODY = struct.Struct("<QIIBB")  # Epoch, from rank, to rank, channel, stream.
ROLE = "rank"
# The channels. Off the control tree, the sender of a message dials a connection for itself.
CONTROL, CONTROL_ONE_WAY, DATA = 0, 1, 2
MOST_STREAMS = 16  # Of data between two ranks.
PROOF_SECONDS = 30.0  # How long one that does not prove who it is may stay connected.
# How many may be connected that have not proved who they are, beside all ranks of the job, which
# may dial all their connections at once.
MOST_STRANGERS = 512
CONNECTIONS_PER_RANK = 2 + MOST_STREAMS  # Control in both ways, and arrays.
OTHER_EPOCH, OTHER_RANK, TAKEN = range(FIRST_OWN, FIRST_OWN + 3)

log = logging.getLogger("hvdlite")


class Slot(NamedTuple):
    """Which connection between two ranks is meant, as one of them sees it."""

    rank: int  # The other one.
    channel: int
    stream: int = 0


class Identity(NamedTuple):
    """What this rank proves, and demands of the others."""

    rank: int
    size: int
    epoch: int
    key: bytes

    @property
    def party(self) -> Party:
        return Party(self.key, ROLE, ROLE)

    def claim(self, slot: Slot) -> bytes:
        """Return what this rank says when it dials."""
        return BODY.pack(self.epoch, self.rank, slot.rank, slot.channel, slot.stream)

    def read(self, body: bytes) -> Slot | Refusal:
        """Return what a peer dials for, whose proof holds, or why there is no such connection.

        Raises `ProtocolError` if it cannot be read.
        """
        if len(body) != BODY.size:
            raise ProtocolError(f"it claims {len(body)} bytes, {BODY.size} are right")
        epoch, sender, receiver, channel, stream = BODY.unpack(body)
        if epoch != self.epoch:  # It has not left an earlier world, or is ahead.
            return Refusal(
                OTHER_EPOCH,
                f"rank {sender} connects in epoch {epoch} of this job, rank {self.rank} is in "
                f"epoch {self.epoch}",
            )
        if receiver != self.rank or sender == self.rank or sender >= self.size:
            return Refusal(OTHER_RANK, f"it means rank {receiver}, this is rank {self.rank}")
        if channel > DATA or stream >= MOST_STREAMS:
            return Refusal(OTHER_RANK, f"there is no stream {stream} of channel {channel}")
        return Slot(sender, channel, stream)


class Connections:
    """The listening sockets of a rank, and its dials; `targets` says where to try a rank."""

    def __init__(
        self,
        loop: Loop,
        me: Identity,
        sockets: Sequence[socket.socket],
        targets: Callable[[int], Sequence[Target]],
        limits: Limits,
    ) -> None:
        # Whoever uses the connections sets these. `connected` is given a connection whose other end
        # has proved to be `slot.rank`, and whether this end has dialled; `unreachable`, why a rank
        # cannot be dialled; `not_entered`, a slot that was `entering` and whose end came first.
        self.connected: Callable[[Slot, socket.socket, bool], None]
        self.unreachable: Callable[[Slot, str], None]
        self.not_entered: Callable[[Slot], None]
        self.me = me
        self._loop, self._targets, self._limits = loop, targets, limits
        self._dials: dict[Slot, Dial] = {}
        self._reached: dict[int, Target] = {}  # Where a rank has answered before.
        self._taken: set[Slot] = set()  # Connections that were accepted.
        self.listener = Listener(
            loop, sockets, me.party, self._on_accepted,
            judge=self._judge, refused=self._on_refused,
            left=lambda claim: self.not_entered(self._slot(claim)),
            most_strangers=MOST_STRANGERS + me.size * CONNECTIONS_PER_RANK,
            stranger_seconds=PROOF_SECONDS, same_user=True,
            other_secret="does not know the secret of this job",
        )  # fmt: skip

    # -- dials

    def dial(self, slot: Slot) -> None:
        """Begin to connect to a rank, first where it has answered before."""
        targets = list(self._targets(slot.rank))
        if slot.rank in self._reached:
            targets.sort(key=lambda target: target != self._reached[slot.rank])
        self._dials[slot] = Dial(
            self._loop, targets, self.me.party, self.me.claim(slot),
            partial(self._on_connected, slot), partial(self._on_failed, slot), self._limits,
        )  # fmt: skip

    def _on_connected(self, slot: Slot, connection: socket.socket, target: Target) -> None:
        del self._dials[slot]
        self._reached[slot.rank] = target
        self.connected(slot, connection, True)

    def _on_failed(self, slot: Slot, failures: list[Failure]) -> None:
        del self._dials[slot]
        reasons = "; ".join(map(str, failures)) or "it has no address that fits"
        self.unreachable(slot, reasons)

    # -- those that come in

    def _judge(self, claim: Claim) -> Refusal | None:
        slot = self.me.read(claim.body)
        if isinstance(slot, Refusal):
            return slot
        return Refusal(TAKEN, "it is connected already") if slot in self._taken else None

    def _on_refused(self, code: int, sentence: str, claim: Claim | None) -> None:
        level = logging.WARNING if code == OTHER_EPOCH else logging.DEBUG
        log.log(level, "rank %d closes a connection: %s", self.me.rank, sentence)

    def _on_accepted(self, claim: Claim, connection: socket.socket) -> None:
        slot = self._slot(claim)
        self._taken.add(slot)
        self.connected(slot, connection, False)

    def _slot(self, claim: Claim) -> Slot:
        slot = self.me.read(claim.body)
        assert isinstance(slot, Slot)  # It was judged.
        return slot

    def entering(self, slot: Slot) -> bool:
        """Return whether `slot` is proved on a connection that is not used yet."""
        return any(self._slot(claim) == slot for claim in self.listener.claims())

    def close(self) -> None:
        """Close the listening sockets, and all that is not connected yet."""
        self.listener.close()
        for dial in self._dials.values():
            dial.cancel()
        self._dials.clear()
