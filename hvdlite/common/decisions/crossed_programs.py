"""Collectives of compiled programs that will never be complete, found by who waits in which.

A rank runs the unnamed collectives of its programs in one order, which is the same on all ranks. So
of two ranks one has come to all collectives that the other one has come to, and maybe to more. If
each of them waits in one that the other has not come to, their programs differ, or one of them has
run fewer collectives: both would wait for ever.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from hvdlite.common.base.bitsets import lowest
from hvdlite.common.requests.messages import OF_PROGRAM, Request

# How long both must have waited: what leaders of ranks hold back has long been reported then.
CROSSED_SECONDS = 3.0


def crossed(
    waiting: Iterable[tuple[Request, int, float]], before: float
) -> list[tuple[Request, str]]:
    """Return the requests of programs that cross others, with an error that names both.

    `waiting` has the requests of a process set, with the masks of the ranks that have not made
    them, and since when they wait; younger ones than `before` do not count.
    """
    found = [
        (request, missing)
        for request, missing, since in waiting
        if since <= before and request.settings.startswith(OF_PROGRAM) and not request.parties
    ]
    errors: list[tuple[Request, str]] = []
    first_of = {missing: request for request, missing in reversed(found)}
    for request, missing in found:
        for other_missing, other in first_of.items():
            rank, other_rank = other_missing & ~missing, missing & ~other_missing
            if rank and other_rank:
                pair = sorted([(lowest(rank), request), (lowest(other_rank), other)])
                errors.append((request, _error(*pair)))
                break
    return errors


def _error(first: tuple[int, Request], other: tuple[int, Request]) -> str:
    (rank, request), (other_rank, other_request) = first, other
    return (
        f"ranks run different programs, or one of them fewer collectives: rank {rank} waits in "
        f"{_place(request)}, to which rank {other_rank} has not come, and rank {other_rank} in "
        f"{_place(other_request)}, to which rank {rank} has not come"
    )


def _place(request: Request) -> str:
    return f"{request.collective} '{request.group or request.name}' of {request.settings}"
