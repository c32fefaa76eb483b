"""Broadcast over several hosts: from one rank of each host to the next, and inside the hosts.

The root, and one rank of every other host, pass on pieces by the `paths` that were chosen, in the
order in which they come: of two trees, a host is deeper in one, and pieces of the other that waited
for those of this one would be late by its rounds, again in every host below. What has come is
shared with the ranks of the host in blocks, while later pieces are on their way. A piece that lies
in one tensor is received where it belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.between_hosts.algorithms import Path
from hvdlite.common.collectives.between_hosts.pipeline import AHEAD
from hvdlite.common.collectives.chained_view import Chain
from hvdlite.common.collectives.multi_host.host_slices import Inside, Layers
from hvdlite.common.transport.base import Pending, Transport

BLOCK_BYTES = 1 << 20  # What the ranks of a host share at a time.


@dataclass(frozen=True)
class Carriers:
    """The ranks that pass on a broadcast, one of each host."""

    places: tuple[int, ...]  # on their hosts
    ranks: tuple[int, ...]
    root_host: int

    @classmethod
    def of(cls, layers: Layers, ranks: Sequence[int], root: int) -> Carriers:
        """Return the root, and a rank with the same place, or a lower one, of each other host."""
        hosts = layers.hosts
        root_host = next(number for number, host in enumerate(hosts) if root in host)
        place = hosts[root_host].index(root)
        places = tuple(place % len(host) for host in hosts)
        chosen = (ranks[host[place]] for host, place in zip(hosts, places, strict=True))
        return cls(places, tuple(chosen), root_host)


class _Receive(NamedTuple):
    piece: int
    body: Array
    pending: Pending


class _Stream:
    """The pieces that come from one host, in order."""

    def __init__(self, receives: Iterator[_Receive]) -> None:
        self._to_post = receives
        self.posted: deque[_Receive] = deque()
        self._post()

    @property
    def first(self) -> _Receive:
        return self.posted[0]

    def pop(self) -> _Receive:
        """Return the first receive, which is done, and post another one."""
        receive = self.posted.popleft()
        self._post()
        return receive

    def _post(self) -> None:
        while len(self.posted) < AHEAD and (receive := next(self._to_post, None)) is not None:
            self.posted.append(receive)


class HostBroadcast:
    """One broadcast at one rank."""

    def __init__(
        self,
        transport: Transport,
        inside: Inside,
        carriers: Carriers,
        host: int,
        arrays: Sequence[Array],
        piece_bytes: int,
    ) -> None:
        self._transport, self._inside, self._carriers = transport, inside, carriers
        self._place = carriers.places[host]
        self._chain = Chain(arrays)
        itemsize = arrays[0].itemsize
        self._length = max(1, piece_bytes // itemsize)  # elements of a piece
        self._block = -(-max(1, BLOCK_BYTES // itemsize) // self._length)  # pieces
        self._pieces = -(-self._chain.size // self._length)
        self._sends: deque[tuple[Pending, Array]] = deque()
        self._came = [False] * self._pieces
        self._shared = 0  # Pieces that the ranks of this host have, or are getting.

    def take_part(self) -> None:
        """Get the data from the rank of this host that passes them on."""
        for block in range(0, self._pieces, self._block):
            self._share(block)

    def carry(self, paths: Sequence[Path]) -> None:
        """Pass on all pieces, which take the paths in turns, as they come."""
        streams = self._streams(paths)
        if not streams:
            for piece in range(self._pieces):
                views = self._views(piece)
                body = views[0] if len(views) == 1 else np.concatenate(views)
                self._send(paths[piece % len(paths)], body)
                self._note(piece)
        while streams:
            self._transport.wait_for_any([stream.first.pending for stream in streams])
            for stream in [each for each in streams if each.first.pending.done()]:
                piece, body, _ = stream.pop()
                self._send(paths[piece % len(paths)], body)
                if len(self._views(piece)) > 1:
                    self._chain.unpack(piece * self._length, body)
                self._note(piece)
                if not stream.posted:
                    streams.remove(stream)
        self._transport.wait([pending for pending, _ in self._sends])

    def _streams(self, paths: Sequence[Path]) -> list[_Stream]:
        """Return the pieces that come, by the host from which they do."""
        pieces: dict[int, list[int]] = {}
        for piece in range(self._pieces):
            parent = paths[piece % len(paths)].parent
            if parent is not None:
                pieces.setdefault(parent, []).append(piece)
        return [_Stream(self._receives(parent, each)) for parent, each in pieces.items()]

    def _receives(self, parent: int, pieces: Sequence[int]) -> Iterator[_Receive]:
        for piece in pieces:
            views = self._views(piece)
            body = views[0]
            if len(views) > 1:
                body = np.empty(sum(view.size for view in views), body.dtype)
            yield _Receive(piece, body, self._transport.irecv(self._carriers.ranks[parent], body))

    def _note(self, piece: int) -> None:
        """Note that a piece has come; share the blocks that are complete, in their order."""
        self._came[piece] = True
        while self._shared < self._pieces:
            end = min(self._shared + self._block, self._pieces)
            if not all(self._came[self._shared : end]):
                return
            self._share(self._shared)
            self._shared = end

    def _send(self, path: Path, body: Array) -> None:
        for child in path.children:
            rank = self._carriers.ranks[child]
            self._sends.append((self._transport.isend(rank, body), body))
        while self._sends and self._sends[0][0].done():
            self._sends.popleft()

    def _views(self, piece: int, pieces: int = 1) -> list[Array]:
        start, stop = piece * self._length, (piece + pieces) * self._length
        return list(self._chain.views(start, min(stop, self._chain.size)))

    def _share(self, first: int) -> None:
        self._inside.broadcast(self._views(first, self._block), self._place)
