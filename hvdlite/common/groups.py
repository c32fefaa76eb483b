"""Tensors that are answered together or not at all. This module never sends, sleeps or reads a
clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdlite.common.messages import NO_BIT, Request, Response


@dataclass
class _Open:
    """A group of which some tensors are still missing, or one has failed."""

    held: list[Response] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    error: str = ""


@dataclass
class _Told:
    """What one rank has reported of a group since it was answered last."""

    size: int
    count: int = 0

    @property
    def complete(self) -> bool:
        return self.count >= self.size


class Groups:
    """The groups of one process set."""

    def __init__(self, members: int) -> None:
        self._members = members  # how many ranks
        self._open: dict[str, _Open] = {}
        self._told: dict[str, dict[int, _Told]] = {}

    def disagreement(self, rank: int, request: Request) -> str:
        """`rank` reports a tensor of a group: why the group cannot be answered, or ''.

        A group is named by the call and so are its tensors, with their number ("x_1of3"): ranks
        with another number of tensors report other names, and would wait for each other for ever.
        """
        told = self._told.setdefault(request.group, {})
        if rank in told and told[rank].complete:  # the next call of this name
            if len(told) == self._members and all(each.complete for each in told.values()):
                told.clear()
            else:
                del told[rank]
        own = told.setdefault(rank, _Told(request.group_size))
        own.count += 1
        for other, each in sorted(told.items()):
            if each.size != own.size:
                first, second = sorted([(rank, own.size), (other, each.size)])
                return (
                    f"{request.collective} '{request.group}': ranks disagree on the number of "
                    f"tensors in the group: rank {first[0]} has {first[1]}, "
                    f"rank {second[0]} has {second[1]}"
                )
        return ""

    def hold(self, response: Response) -> list[Response]:
        """A tensor can be answered; what can be ordered now: nothing, or the rest of its group."""
        request = response.request
        if not request.group:
            return [response]
        group = self._open.setdefault(request.group, _Open())
        group.held.append(response)
        group.seen.add(request.name)
        complete = len(group.seen) >= request.group_size
        if not complete and not group.error:
            return []
        released, group.held = group.held, []
        if complete:
            del self._open[request.group]
            self._told.pop(request.group, None)
        return [self._spoilt(each, group.error) for each in released]

    def poison(self, name: str, response: Response) -> None:
        """One tensor of the group `name` has failed: nothing of the group may run."""
        group = self._open.setdefault(name, _Open())
        group.error = group.error or response.error
        group.seen.add(response.request.name)

    def _spoilt(self, response: Response, error: str) -> Response:
        if not error or response.error:
            return response
        return response._replace(error=error, bit=NO_BIT)
