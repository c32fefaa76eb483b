"""Groups: tensors that are answered together or not at all.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet, lowest
from hvdlite.common.plain.messages import NO_BIT, Request, Response


@dataclass
class _Open:
    """A group of which some tensors are still missing, or one has failed."""

    held: list[Response] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    error: str = ""


class Groups:
    """The groups of one process set."""

    def __init__(self, members: int) -> None:
        self._members = members  # how many ranks
        self._open: dict[str, _Open] = {}
        # What ranks have reported of a group since it was answered last:
        # group -> (size, number of tensors reported) -> the ranks with just these, as bits.
        self._told: dict[str, dict[tuple[int, int], int]] = {}

    def disagreement(self, ranks: int, request: Request, count: int) -> str:
        """`ranks` report `count` tensors of the group of `request`: why the group cannot be
        answered, or ''.

        A group is named by the call and so are its tensors, with their number ("x_1of3"): ranks
        with another number of tensors report other names, and would wait for each other for ever.
        """
        told = self._told.setdefault(request.group, {})
        whole = (request.group_size, count)
        if count == request.group_size and len(told) == (whole in told):
            known = told.get(whole, 0)
            if not known & ranks:  # the rule: all report all of the group, once
                told[whole] = known | ranks
                return ""
        self._begin_again(told, ranks)
        new = ranks
        for (size, before), mask in [*told.items()]:
            if mask & ranks:
                new &= ~mask
                _move(told, mask & ranks, (size, before), (size, before + count))
        if new:
            key = (request.group_size, count)
            told[key] = told.get(key, 0) | new
        sizes = _by_size(told)
        return _disagreement(sizes, lowest(ranks), request) if len(sizes) > 1 else ""

    def _begin_again(self, told: dict[tuple[int, int], int], ranks: int) -> None:
        """For ranks that had reported their whole group this is the next call of its name."""
        complete = {key: mask for key, mask in told.items() if key[1] >= key[0]}
        if not any(mask & ranks for mask in complete.values()):
            return
        if complete == told and sum(map(int.bit_count, told.values())) == self._members:
            told.clear()
        for key, mask in complete.items():
            if key in told:
                _move(told, mask & ranks, key, None)

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

    def take_held(self) -> list[Response]:
        """Forget all groups; the tensors that were held until their group is complete."""
        held = [response for group in self._open.values() for response in group.held]
        self._open.clear()
        self._told.clear()
        return held

    def poison(self, name: str, response: Response) -> None:
        """One tensor of the group `name` has failed: nothing of the group may run."""
        group = self._open.setdefault(name, _Open())
        group.error = group.error or response.error
        group.seen.add(response.request.name)

    def _spoilt(self, response: Response, error: str) -> Response:
        if not error or response.error:
            return response
        return response._replace(error=error, bit=NO_BIT)


class GroupSizes:
    """With how many tensors ranks report each group of one process set, as a leader sees them.

    Ranks with another number of tensors report other names, which would wait for each other: the
    leader has to pass on what it holds of such a group, and the coordinator says what is wrong.
    """

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}  # of groups that were reported and not answered
        self._uneven: set[str] = set()  # of these, the ones with two sizes
        self._bits: dict[tuple[str, int], NumberSet] = {}  # (group, size) -> bits of its tensors
        self._group_of: dict[int, tuple[str, int]] = {}  # the same by bit

    def remember(self, request: Request, bit: int) -> None:
        """The members remember the answer for a tensor of a group under `bit`."""
        group = self._group_of[bit] = request.group, request.group_size
        self._bits[group] = self._bits.get(group, NO_NUMBERS) | NumberSet.of((bit,))

    def forget(self, bit: int) -> None:
        """The members forget a bit."""
        group = self._group_of.pop(bit, None)
        if group is not None:
            left = self._bits[group] = self._bits[group] - NumberSet.of((bit,))
            if not left:
                del self._bits[group]

    def is_uneven(self, group: str, size: int) -> bool:
        """A rank reports a group of this size: whether ranks have reported two sizes of it."""
        if self._sizes.setdefault(group, size) != size:
            self._uneven.add(group)
        return group in self._uneven

    def uneven(self, bits: NumberSet) -> list[str]:
        """A rank reports these bits: the groups among them of which there are two sizes."""
        reported = [group for group, own in self._bits.items() if own & bits]
        return [name for name, size in reported if self.is_uneven(name, size)]

    def bits_of(self, name: str) -> NumberSet:
        """The bits of a group's tensors, of any size."""
        found = NO_NUMBERS
        for (group, _), bits in self._bits.items():
            if group == name:
                found |= bits
        return found

    def note_answer(self, group: str) -> None:
        """A tensor of the group can be run: all ranks have reported one size.

        After an error the group stays uneven, as ranks that come late have to hear of it too.
        """
        self._sizes.pop(group, None)
        self._uneven.discard(group)

    def note_answered_bit(self, bit: int) -> None:
        """The coordinator has answered a tensor that may be of a group."""
        if bit in self._group_of:
            self.note_answer(self._group_of[bit][0])


def _move(
    told: dict[tuple[int, int], int],
    ranks: int,
    old: tuple[int, int],
    new: tuple[int, int] | None,
) -> None:
    told[old] &= ~ranks
    if not told[old]:
        del told[old]
    if new:
        told[new] = told.get(new, 0) | ranks


def _by_size(told: dict[tuple[int, int], int]) -> dict[int, int]:
    sizes: dict[int, int] = {}
    for (size, _), mask in told.items():
        sizes[size] = sizes.get(size, 0) | mask
    return sizes


def _disagreement(sizes: dict[int, int], rank: int, request: Request) -> str:
    """Between `rank` and the first rank that has told another size."""
    own = next(size for size, mask in sizes.items() if mask >> rank & 1)
    others = ((lowest(mask), size) for size, mask in sizes.items() if size != own)
    first, second = sorted([(rank, own), min(others)])
    return (
        f"{request.collective} '{request.group}': ranks disagree on the number of "
        f"tensors in the group: rank {first[0]} has {first[1]}, "
        f"rank {second[0]} has {second[1]}"
    )
