"""Process sets that come and go: the same change of the table at every rank that has one.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdlite.common.base.bitsets import mask_of
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.plain.messages import Request, Response
from hvdlite.common.plain.process_set_table import FormedSet, ProcessSetTable, unflatten


class Releases:
    """The uses of formed sets that some members have released, and others have not.

    Nobody waits for a release, so it is no tensor that could stall, and a rank that has shut down
    needs not make it.
    """

    def __init__(self) -> None:
        self._released: dict[Request, int] = {}  # The mask of the ranks that have.

    def add(self, request: Request, ranks: int) -> None:
        """Count a release by `ranks`."""
        self._released[request] = self._released.get(request, 0) | ranks

    def pop_complete(self, departed: int) -> list[Request]:
        """Forget and return those that all members have made but the `departed` ones, a mask."""
        complete = [
            request
            for request, ranks in self._released.items()
            if not mask_of(request.parties) & ~(ranks | departed)
        ]
        for request in complete:
            del self._released[request]
        return complete


class SetChange(NamedTuple):
    """What one answer has changed: process set ids."""

    made: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()
    formed: FormedSet | None = None  # What the members of a formed set learn.


def change_sets(table: ProcessSetTable, response: Response) -> SetChange:
    """Change the process sets as an answer without an error says; most answers change nothing."""
    request = response.request
    effect = SPECS[request.collective].effect
    if effect is Effect.ADD_SET:
        before = table.all()
        added = [table.add(ranks) for ranks in unflatten(response.first_dims)]
        return SetChange(made=tuple(each for each in added if each not in before))
    if effect is Effect.REMOVE_SET:
        return SetChange(gone=tuple(each for each in response.first_dims if table.remove(each)))
    if effect is Effect.FORM_SET:
        formed = table.form(request.parties)
        return SetChange((formed.process_set_id,) if formed.is_new else (), (), formed)
    if effect is Effect.RELEASE_SET and table.release(request.root_rank):
        return SetChange(gone=(request.root_rank,))
    return SetChange()
