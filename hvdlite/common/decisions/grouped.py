"""Grouped collectives: tensors that are answered together or not at all.

A group is named by its call, and so are its tensors, with the size of the group ("x_1of3"). Ranks
with another number of tensors therefore report other names, and would wait for each other forever:
both classes here compare the sizes while tensors are still incomplete.

This module never sends, sleeps or reads a clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from hvdlite.common.base.bitsets import NO_NUMBERS, NumberSet, lowest
from hvdlite.common.requests.messages import NO_BIT, Request, Response

# What ranks have reported of one group: (size of the group, number of tensors reported) -> the mask
# of the ranks with exactly these two numbers.
_Reported: TypeAlias = dict[tuple[int, int], int]


@dataclass
class _OpenGroup:
    held: list[Response] = field(default_factory=list)
    answered: set[str] = field(default_factory=set)
    error: str = ""  # Of the first tensor that failed: the others fail with it.


class Groups:
    """The groups of one process set, as the coordinator sees them."""

    def __init__(self, members: int) -> None:
        self._members = members  # The number of ranks in the process set.
        self._open: dict[str, _OpenGroup] = {}
        # By group, since the group was answered last.
        self._reported: dict[str, _Reported] = {}
        # What the ranks have set that report a group of this size, for errors.
        self._settings: dict[tuple[str, int], str] = {}

    def disagreement(self, ranks: int, request: Request, count: int) -> str:
        """Record that `ranks` report `count` more tensors of the group of `request`.

        Returns the error if ranks disagree on the size of the group, otherwise ''.
        """
        reported = self._reported.setdefault(request.group, {})
        whole = (request.group_size, count)
        if request.settings:
            self._settings[request.group, request.group_size] = request.settings
        # The common case: every rank reports the whole group at once, and all groups are equal.
        if count == request.group_size and len(reported) == (whole in reported):
            earlier = reported.get(whole, 0)
            if not earlier & ranks:
                reported[whole] = earlier | ranks
                return ""
        self._restart(reported, ranks)
        new = ranks
        for (size, before), mask in [*reported.items()]:
            if mask & ranks:
                new &= ~mask
                _move(reported, mask & ranks, (size, before), (size, before + count))
        if new:
            reported[whole] = reported.get(whole, 0) | new
        sizes: dict[int, int] = {}  # The mask of the ranks by the size of their group.
        for (size, _), mask in reported.items():
            sizes[size] = sizes.get(size, 0) | mask
        if len(sizes) < 2:
            return ""
        settings = {size: self._settings.get((request.group, size), "") for size in sizes}
        return _disagreement(sizes, settings, lowest(ranks), request)

    def _restart(self, reported: _Reported, ranks: int) -> None:
        """Forget ranks that had reported their whole group: this is the next call of its name."""
        complete = {key: mask for key, mask in reported.items() if key[1] >= key[0]}
        if not any(mask & ranks for mask in complete.values()):
            return
        if complete == reported and sum(map(int.bit_count, reported.values())) == self._members:
            reported.clear()
        for key, mask in complete.items():
            if key in reported:
                _move(reported, mask & ranks, key, None)

    def hold(self, response: Response) -> list[Response]:
        """Hold the answer of a tensor until its group is complete.

        Returns the answers that can be ordered now: none, or all that were held of the group.
        """
        request = response.request
        if not request.group:
            return [response]
        group = self._open.setdefault(request.group, _OpenGroup())
        group.held.append(response)
        group.answered.add(request.name)
        complete = len(group.answered) >= request.group_size
        if not complete and not group.error:
            return []
        released, group.held = group.held, []
        if complete:
            del self._open[request.group]
            self._reported.pop(request.group, None)
        if not group.error:
            return released
        return [
            held if held.error else held._replace(error=group.error, bit=NO_BIT)
            for held in released
        ]

    def pop_held(self) -> list[Response]:
        """Forget all groups; return the answers that were held."""
        held = [response for group in self._open.values() for response in group.held]
        self._open.clear()
        self._reported.clear()
        self._settings.clear()
        return held

    def fail(self, name: str, response: Response) -> None:
        """Record that one tensor of the group `name` has failed: the others fail with it."""
        group = self._open.setdefault(name, _OpenGroup())
        group.error = group.error or response.error
        group.answered.add(response.request.name)


class GroupSizes:
    """The sizes with which ranks report each group of one process set, as a leader sees them.

    A leader passes on what it holds of a group with two sizes; the coordinator words the error.
    """

    def __init__(self) -> None:
        # The first size of each group that was reported and not answered, and the groups of which
        # a second size was reported.
        self._sizes: dict[str, int] = {}
        self._uneven: set[str] = set()
        # The cached bits of each (group, size), and the reverse.
        self._bits: dict[tuple[str, int], NumberSet] = {}
        self._group_of: dict[int, tuple[str, int]] = {}

    def remember(self, request: Request, bit: int) -> None:
        """Record that the members remember the answer for a tensor of a group under `bit`."""
        group = self._group_of[bit] = request.group, request.group_size
        self._bits[group] = self._bits.get(group, NO_NUMBERS) | NumberSet.of((bit,))

    def forget(self, bit: int) -> None:
        group = self._group_of.pop(bit, None)
        if group is not None:
            left = self._bits[group] = self._bits[group] - NumberSet.of((bit,))
            if not left:
                del self._bits[group]

    def is_uneven(self, group: str, size: int) -> bool:
        """Record that a rank reports a group of this size; return whether there are two sizes."""
        if self._sizes.setdefault(group, size) != size:
            self._uneven.add(group)
        return group in self._uneven

    def uneven(self, bits: NumberSet) -> list[str]:
        """Record that a rank reports these bits; return their groups that have two sizes."""
        reported = [group for group, group_bits in self._bits.items() if group_bits & bits]
        return [name for name, size in reported if self.is_uneven(name, size)]

    def bits_of(self, name: str) -> NumberSet:
        """Return the bits of all tensors of a group, of any size."""
        all_bits = NO_NUMBERS
        for (group, _), bits in self._bits.items():
            if group == name:
                all_bits |= bits
        return all_bits

    def note_answer(self, group: str) -> None:
        """Record that a tensor of the group can run: all ranks have reported one size.

        After an error the group stays uneven, since late ranks must hear of the error too.
        """
        self._sizes.pop(group, None)
        self._uneven.discard(group)

    def note_answered_bit(self, bit: int) -> None:
        """Record that the coordinator has answered a cached tensor, perhaps one of a group."""
        if bit in self._group_of:
            self.note_answer(self._group_of[bit][0])


def _move(
    reported: _Reported, ranks: int, old: tuple[int, int], new: tuple[int, int] | None
) -> None:
    """Move `ranks` from one key to another; None forgets them."""
    reported[old] &= ~ranks
    if not reported[old]:
        del reported[old]
    if new:
        reported[new] = reported.get(new, 0) | ranks


def _disagreement(
    sizes: dict[int, int], settings: dict[int, str], rank: int, request: Request
) -> str:
    """Return the error that names `rank` and the first rank with another size, ascending."""
    rank_size = next(size for size, mask in sizes.items() if mask >> rank & 1)
    others = ((lowest(mask), size) for size, mask in sizes.items() if size != rank_size)
    first, second = (
        (each, f"{size} ({settings[size]})" if settings[size] else size)
        for each, size in sorted([(rank, rank_size), min(others)])
    )
    return (
        f"{request.collective} '{request.group}': ranks disagree on the number of "
        f"tensors in the group: rank {first[0]} has {first[1]}, "
        f"rank {second[0]} has {second[1]}"
    )
