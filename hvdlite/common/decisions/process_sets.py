"""The coordinator's state of each process set, and sets that come and go.

A set comes or goes by the same change of the table at every rank that has one.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hvdlite.common.base.bitsets import mask_of
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.decisions.bit_readiness import BitReadiness
from hvdlite.common.decisions.grouped import Groups
from hvdlite.common.decisions.request_readiness import RequestReadiness
from hvdlite.common.decisions.response_cache import CoordinatorCache
from hvdlite.common.requests.messages import NO_RANK, Request, Response
from hvdlite.common.requests.process_set_table import FormedSet, ProcessSetTable, unflatten


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


class ProcessSetState:
    """What the members of one process set have reported, and what they remember."""

    def __init__(self, process_set_id: int, members: tuple[int, ...], cache_capacity: int) -> None:
        self.process_set_id = process_set_id
        self.members = members
        self.mask = mask_of(members)
        self.requests = RequestReadiness(self.mask)
        self.bits = BitReadiness(self.mask)
        self.cache = CoordinatorCache(cache_capacity)
        self.groups = Groups(len(members))
        # The data that ranks have sent with bits that are not complete: bit -> rank -> data.
        self.carried: dict[int, dict[int, bytes]] = {}
        # The member whose join was counted last: the public join() returns it.
        self.last_joined = NO_RANK
        # Set while some members have joined, and not all.
        self.join: Request | None = None
        # How many joins are complete, and how many bits were evicted. A join request carries the
        # same two counts of its rank, so that a join that has crossed an eviction is recognised.
        self.joins = 0
        self.evictions = 0
        # When a tensor was answered or a rank joined last. A join stalls only without progress.
        self.progress = 0.0

    def expect(self, ranks: int) -> None:
        """Count these members as joined no longer."""
        self.bits.expect(ranks)
        self.requests.expect(ranks)
        if not self.bits.absent:
            self.join = None

    def needed(self, request: Request) -> int:
        """Return the mask of the ranks that make a request."""
        return mask_of(request.parties) if request.parties else self.mask

    def waiting(self) -> Iterator[tuple[Request, int, float]]:
        """Yield each incomplete tensor: a request, the ranks that miss it, and since when."""
        for bit, missing, since in self.bits.waiting():
            yield self.cache.peek(bit)[0].request, missing, since
        yield from self.requests.waiting()
