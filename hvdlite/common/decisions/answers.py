"""The answer to requests that all members have made for one tensor: a response or an error.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from hvdlite.common.base.bitsets import lowest, numbers_of
from hvdlite.common.base.errors import DEPARTED, HAS_SHUT_DOWN
from hvdlite.common.collectives.table import SPECS, CollectiveSpec, disagreement
from hvdlite.common.decisions.request_readiness import RanksByRequest, all_ranks
from hvdlite.common.plain.messages import Request, Response


def answer(requests: RanksByRequest, members: tuple[int, ...]) -> Response:
    """Return the response for requests that all members have made, except those that joined.

    The response carries an error where the ranks disagree, or where none of them has the data.
    """
    (request, ranks), *others = by_rank(requests)
    for other, other_ranks in others:
        error = disagreement((lowest(ranks), request), (lowest(other_ranks), other))
        if error:
            return Response(request, error=error)
    spec = SPECS[request.collective]
    error = _refusal(spec, request, all_ranks(requests))
    if error:
        return Response(request, error=error)
    if not spec.varying_rows:
        return Response(request)
    rows = {rank: r.shape[0] for r, ranks in requests.items() for rank in numbers_of(ranks)}
    return Response(request, first_dims=tuple(rows.get(rank, 0) for rank in members))


def _refusal(spec: CollectiveSpec, request: Request, ranks: int) -> str:
    """Return why the collective cannot run with the data of `ranks`, or ''."""
    if not spec.scalars and not request.shape:
        return (
            f"{spec.name} '{request.name}': a tensor without dimensions has no rows; "
            "reshape it to (1,)"
        )
    if spec.rooted and not ranks >> request.root_rank & 1:
        lacks = "takes no result" if spec.reduces else "has no data to give"
        return f"{spec.name} '{request.name}': root rank {request.root_rank} has joined and {lacks}"
    return ""


def departure_error(rank: int, request: Request, reason: str = "") -> str:
    """Return the error of a tensor that `rank`, which has shut down, will never submit."""
    how = reason or HAS_SHUT_DOWN
    return f"{request.collective} '{request.name}': rank {rank} {how} {DEPARTED}"


def join_error(rank: int, request: Request) -> str:
    """Return the error of a request that needs `rank`, which has joined without making it."""
    return (
        f"{request.collective} '{request.name}': rank {rank} has called join(), which has not "
        "returned: it takes part in nothing until then. Call join after everything else"
    )


def by_rank(requests: RanksByRequest) -> list[tuple[Request, int]]:
    """Return the requests with their ranks, the request of the lowest rank first.

    Errors name the first pair of ranks that disagree, so the order makes them reproducible.
    """
    return sorted(requests.items(), key=lambda item: lowest(item[1]))
