"""Broadcast over several hosts: from one rank of each host to the next, and inside the hosts.

The root, and one rank of every other host, pass on pieces by the `paths` that were chosen. What has
come is shared with the ranks of the host in blocks, while later pieces are on their way. A piece
that lies in one tensor is received where it belongs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.chained_view import Chain
from hvdlite.common.collectives.layers import Inside, Layers
from hvdlite.common.collectives.paths import Path
from hvdlite.common.collectives.pipeline import AHEAD
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
        self._transport = transport
        self._inside = inside
        self._carriers = carriers
        self._place = carriers.places[host]
        self._chain = Chain(arrays)
        itemsize = arrays[0].itemsize
        self._length = max(1, piece_bytes // itemsize)  # elements of a piece
        self._block = -(-max(1, BLOCK_BYTES // itemsize) // self._length)  # pieces
        self._pieces = -(-self._chain.size // self._length)
        self._sends: deque[tuple[Pending, Array]] = deque()

    def take_part(self) -> None:
        """Get the data from the rank of this host that passes them on."""
        for block in range(0, self._pieces, self._block):
            self._share(block)

    def carry(self, paths: Sequence[Path]) -> None:
        """Pass on all pieces, which take the paths in turns."""
        to_post = self._receives(paths)
        posted: deque[tuple[Array, Pending]] = deque()
        for piece in range(self._pieces):
            path = paths[piece % len(paths)]
            if path.parent is None:
                body = self._gathered(piece)
            else:
                while len(posted) < AHEAD and (receive := next(to_post, None)) is not None:
                    posted.append(receive)
                body, pending = posted.popleft()
                self._transport.wait([pending])
            self._send(path, body)
            if path.parent is not None and len(self._views(piece)) > 1:
                self._chain.unpack(piece * self._length, body)
            if (piece + 1) % self._block == 0 or piece + 1 == self._pieces:
                self._share(piece // self._block * self._block)
        self._transport.wait([pending for pending, _ in self._sends])

    def _receives(self, paths: Sequence[Path]) -> Iterator[tuple[Array, Pending]]:
        """Post a receive for each piece."""
        for piece in range(self._pieces):
            parent = paths[piece % len(paths)].parent
            if parent is not None:
                views = self._views(piece)
                body = views[0]
                if len(views) > 1:
                    body = np.empty(sum(view.size for view in views), body.dtype)
                yield body, self._transport.irecv(self._carriers.ranks[parent], body)

    def _send(self, path: Path, body: Array) -> None:
        for child in path.children:
            rank = self._carriers.ranks[child]
            self._sends.append((self._transport.isend(rank, body), body))
        while self._sends and self._sends[0][0].done():
            self._sends.popleft()

    def _views(self, piece: int, pieces: int = 1) -> list[Array]:
        """Return the parts of the tensors in some pieces."""
        start, stop = piece * self._length, (piece + pieces) * self._length
        return list(self._chain.views(start, min(stop, self._chain.size)))

    def _gathered(self, piece: int) -> Array:
        """Return a piece as one array."""
        views = self._views(piece)
        return views[0] if len(views) == 1 else np.concatenate(views)

    def _share(self, first: int) -> None:
        self._inside.broadcast(self._views(first, self._block), self._place)
