"""Pieces of the next push of a table in one layout, which go to other hosts during backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hvdlite.ps.blocks import Array, Block
from hvdlite.ps.client import Client
from hvdlite.ps.link import ServerLink
from hvdlite.ps.pieces import EarlySender, Rest, rest_of
from hvdlite.ps.shard import Shard


class EarlyPushes:
    """Sends pieces to the shards of one layout, and to no others.

    A table that moves makes new ones: what was sent before belongs to shards that are retired, so
    that the push is sent whole, or its pieces by the new ones.
    """

    def __init__(
        self, client: Client, blocks: Sequence[Sequence[Block]], first_key: int,
        shards: Sequence[Shard], links: Sequence[ServerLink],
    ) -> None:  # fmt: skip
        self._client, self._blocks = client, blocks
        self._shards, self._links = shards, links
        self._sender = EarlySender(blocks, first_key)

    def send(self, tensor: int, gradient: Callable[[], Array]) -> None:
        """Send what is large of the gradient of a tensor, if it goes to another host.

        May be called in any thread; pieces go in the order of the calls.
        """
        if not self._sender.wants(tensor):
            return
        far = [server for server, link in enumerate(self._links) if not link.shares_memory]
        if not far:
            return
        for server, body, payload in self._sender.pieces_of(tensor, gradient(), far=far):
            self._client.call(partial(self._shards[server].push_piece, body, payload))

    def end(self, tensors: Sequence[Array]) -> Callable[[int, Sequence[memoryview]], Rest | None]:
        """End a step with these gradients, or without any.

        Return what tells, for a server and the payloads of its push, what is left to be sent; None:
        all of it.
        """
        gone = self._sender.end(tensors)

        def rest(server: int, payloads: Sequence[memoryview]) -> Rest | None:
            if server not in gone:
                return None
            return rest_of(self._blocks[server], gone[server], payloads)

        return rest
