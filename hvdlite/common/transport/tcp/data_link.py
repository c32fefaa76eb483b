"""Arrays between two ranks: which bytes go over which of their connections, the streams.

Two ranks have several streams when one does not fill the link. Which bytes go over which stream
follows from the sizes and the order of the arrays alone, so that sender and receiver need not
agree: small arrays over the first stream, large ones over all in turns, and very large ones in as
many parts as there are streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.connections.liveness import Liveness
from hvdlite.common.connections.loop import Loop
from hvdlite.common.transport.base import Array
from hvdlite.common.transport.tcp.streams import Stream, Transfer

SMALL_BYTES = 64 << 10  # Such arrays need no second stream.
SPLIT_BYTES = 1 << 20  # Larger arrays are split.


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
        dial: Callable[[int, int], None] | None,
    ) -> None:
        """`ranks` are this one and the other; `loss` makes the error of a rank that is gone.

        `dial` connects a stream, by rank and number; None where the other rank does.
        """
        self.me, self.rank = ranks
        self.poller, self.liveness = poller, liveness
        self.streams = [Stream(self) for _ in range(streams)]
        self._used = 0  # Streams that were needed so far.
        self._loss, self._dial = loss, dial
        self._sent = self._received = 0  # Arrays that took their turn.

    def loss(self, error: OSError | None) -> PeerLostError:
        """Return the error of a transfer that cannot end."""
        return self._loss(self.rank, error)

    def send(self, array: Array) -> Transfer:
        """Start to send a contiguous array."""
        self.use(array.nbytes)
        body = _bytes_of(array)
        cut = self._cut(body, self._sent)
        self._sent += self._takes_turn(len(body))
        transfer = Transfer(self.rank, len(cut), self._move_out)
        for stream, part in cut:
            stream.send(transfer, len(body), part)
        return transfer

    def receive(self, array: Array) -> Transfer:
        """Start to receive into a contiguous array."""
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
                self._dial(self.rank, self._used)
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
        """Close the connections."""
        for stream in self.streams:
            stream.close()
