"""Count which ranks are ready for new tensors, by name, and answer what all have asked for.

Coordinator and leaders count by the same class. Equal requests are stored once, with their ranks as
a mask, so that memory and time do not grow with the number of ranks. This module
never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from hvdlite.common.base.bitsets import lowest, mask_of, numbers_of
from hvdlite.common.base.errors import DEPARTED, HAS_SHUT_DOWN
from hvdlite.common.collectives.kernels import neutral_value
from hvdlite.common.collectives.table import SPECS, CollectiveSpec, disagreement
from hvdlite.common.requests.messages import Request, Response

# The different requests for one name, each with the mask of the ranks that made it.
RanksByRequest: TypeAlias = dict[Request, int]


def all_ranks(requests: RanksByRequest) -> int:
    """Return the mask of all ranks that made one of the requests."""
    ranks = 0
    for mask in requests.values():
        ranks |= mask
    return ranks


@dataclass
class _Tensor:
    since: float
    needed: int  # The mask of the ranks below that make the request.
    excuses: bool  # Whether ranks that have joined count as ready for it.
    ranks: int = 0
    requests: RanksByRequest = field(default_factory=dict)


class RequestReadiness:
    """Which of the needed ranks have requested each name."""

    def __init__(self, needed: int) -> None:
        # All ranks that report here, as a mask, and those among them that count as ready for
        # everything, because they have joined.
        self._needed = needed
        self._absent = 0
        self._tensors: dict[str, _Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def add(self, request: Request, ranks: int, now: float) -> RanksByRequest:
        """Count a request of `ranks`.

        When it completes its name, the name is forgotten and all requests for it are returned.
        """
        tensor = self._tensors.get(request.name)
        if tensor is None:
            needed = mask_of(request.parties) & self._needed if request.parties else self._needed
            tensor = self._tensors[request.name] = _Tensor(now, needed, not request.parties)
        tensor.ranks |= ranks
        tensor.requests[request] = tensor.requests.get(request, 0) | ranks
        return {} if self._missing(tensor) else self.pop(request.name)

    def pop(self, name: str) -> RanksByRequest:
        tensor = self._tensors.pop(name, None)
        return tensor.requests if tensor else {}

    def excuse(self, ranks: int) -> list[RanksByRequest]:
        """Count `ranks` as ready from now on; forget and return what that completes, in order."""
        self._absent |= ranks & self._needed
        complete = [name for name, tensor in self._tensors.items() if not self._missing(tensor)]
        return [self.pop(name) for name in complete]

    def expect(self, ranks: int) -> None:
        self._absent &= ~ranks

    def pop_overdue(self, before: float) -> list[RanksByRequest]:
        """Forget and return the names that wait since before `before`."""
        late = [name for name, tensor in self._tensors.items() if tensor.since < before]
        return [self.pop(name) for name in late]

    @property
    def oldest(self) -> float | None:
        """Since when the oldest name waits; None without any."""
        for tensor in self._tensors.values():  # Dicts keep the order of arrival.
            return tensor.since
        return None

    def waiting(self) -> Iterator[tuple[Request, int, float]]:
        """Yield a request of each name, the mask of the missing ranks, and since when it waits."""
        for tensor in self._tensors.values():
            yield next(iter(tensor.requests)), self._missing(tensor), tensor.since

    def missing(self, name: str) -> int:
        """Return the mask of the ranks that a name waits for; 0 for one that does not wait."""
        tensor = self._tensors.get(name)
        return self._missing(tensor) if tensor else 0

    def _missing(self, tensor: _Tensor) -> int:
        excused = self._absent if tensor.excuses else 0
        return tensor.needed & ~(tensor.ranks | excused)


def earliest(times: Iterable[float | None]) -> float | None:
    """Return the earliest time, without those that are None; None without any."""
    return min((time for time in times if time is not None), default=None)


def answer(requests: RanksByRequest, members: tuple[int, ...]) -> Response:
    """Return the response for requests that all members have made, except those that joined.

    The response carries an error where the ranks disagree, or where none of them has the data.
    """
    ordered = by_rank(requests)
    (request, ranks), *others = ordered
    for other, other_ranks in others:
        error = disagreement((lowest(ranks), request), (lowest(other_ranks), other))
        if error:
            return Response(request, error=error)
    spec, present = SPECS[request.collective], all_ranks(requests)
    for each, _ in ordered:
        error = _refusal(spec, each, present, present != mask_of(members))
        if error:
            return Response(request, error=error)
    if not spec.varying_rows:
        return Response(request)
    rows = {rank: r.shape[0] for r, ranks in requests.items() for rank in numbers_of(ranks)}
    return Response(request, first_dims=tuple(rows.get(rank, 0) for rank in members))


def _refusal(spec: CollectiveSpec, request: Request, ranks: int, joined: bool) -> str:
    """Return why the collective cannot run with the data of `ranks`, or ''.

    `joined` tells whether other members give neutral data.
    """
    if not spec.scalars and not request.shape:
        return (
            f"{spec.name} '{request.name}': a tensor without dimensions has no rows; "
            "reshape it to (1,)"
        )
    if spec.rooted and not ranks >> request.root_rank & 1:
        lacks = "takes no result" if spec.reduces else "has no data to give"
        return f"{spec.name} '{request.name}': root rank {request.root_rank} has joined and {lacks}"
    if joined and spec.reduces and neutral_value(request) is None:
        return (
            f"{spec.name} '{request.name}': a rank has joined, and no {request.dtype} becomes 1 "
            f"when it is scaled by {request.prescale_factor}: give a postscale_factor instead"
        )
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
