"""The exchange of the ranks of one world, through their driver."""

from __future__ import annotations

from collections.abc import Callable

from hvdlite.common.meeting.wire import check_body
from hvdlite.common.membership.frames import World

Gather = Callable[[int, int, bytes], list[bytes]]


class LinkExchange:
    """See `Exchange`; ``gather(epoch, number, body)`` returns the bodies of a round."""

    def __init__(self, world: World, gather: Gather) -> None:
        self.rank, self.size = world.rank, world.size
        self._epoch, self._gather = world.epoch, gather
        self._round = 0

    def allgather(self, body: bytes) -> list[bytes]:
        """See `Exchange.allgather`. There is no limit: the driver ends a world that cannot meet."""
        check_body(body)
        number, self._round = self._round, self._round + 1
        return self._gather(self._epoch, number, bytes(body))

    def close(self) -> None:
        """See `Exchange.close`."""
