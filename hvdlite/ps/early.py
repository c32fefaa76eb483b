"""Pieces of the next push of a table in one layout, which go to other hosts during backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from hvdlite.ps.blocks import Array, Block, dtype_of
from hvdlite.ps.client import Client
from hvdlite.ps.link import ServerLink
from hvdlite.ps.pieces import EarlySender, Gone
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
        self._client, self._shards, self._links = client, shards, links
        self._sender = EarlySender(blocks, first_key, partial(new_memory, client))

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

    def end(self, tensors: Sequence[Array]) -> dict[int, Gone]:
        """End a step with these gradients, or without any.

        Return by server what was sent of them; a server that is not there is to get all of it.
        """
        return self._sender.end(tensors)


def new_memory(client: Client, block: Block) -> Array:
    """Return memory for a block, from which a client sends it."""
    return client.new(block.size, dtype_of(block.dtype))
