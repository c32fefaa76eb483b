"""Recursive doubling of whole tensors: an allreduce in log2 N rounds, for tensors of a few KiB.

In each round a member and its partner send each other all that they have added up, and both add it
in the order of their numbers, so that both have the same bits: a tree of sums without a root. See
Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
(2005). With 4 members:

    round 0     0 <-> 1     2 <-> 3     all have (0+1) or (2+3)
    round 1     0 <-> 2     1 <-> 3     all have (0+1)+(2+3)

It needs a power of two. Of N members, N - 2^k first send theirs to the member before them, and get
the result at the end: two rounds more. With 3 members:

    round 0     1 --> 0
    round 1     0 <-> 2
    round 2     0 --> 1

Price, of S bytes: ceil(log2 N) rounds of S bytes in and out, and one more where N is no power of
two. Trees and halving take twice as many rounds, and fewer bytes.
"""

from __future__ import annotations

from hvdlite.common.collectives.schedule import Move, Round, Schedule


def doublings(size: int) -> int:
    """Return how often sums are doubled: k for the largest 2^k that is not above `size`."""
    return size.bit_length() - 1


def recursive_doubling(size: int, index: int) -> Schedule:
    """Return the schedule of member `index` of `size`: one block."""
    count = doublings(size)
    extra = size - (1 << count)  # Pairs of members of which the second has no partner.
    if not extra:
        return Schedule((0,), _exchanges(size, index, count, extra), 1)
    before, after = Round(), Round()
    exchanges = tuple(Round() for _ in range(count))
    if index < 2 * extra:
        is_extra = index % 2 == 1
        other = index - 1 if is_extra else index + 1
        give, take = (Move(other, 0, 1, partial) for partial in (True, False))
        before = Round(sends=(give,)) if is_extra else Round(receives=(give,))
        after = Round(receives=(take,)) if is_extra else Round(sends=(take,))
    if index >= 2 * extra or index % 2 == 0:
        exchanges = _exchanges(size, index, count, extra)
    return Schedule((0,), (before, *exchanges, after), 1)


def _exchanges(size: int, index: int, count: int, extra: int) -> tuple[Round, ...]:
    """Return the rounds in which partners exchange their sums."""
    place = index // 2 if index < 2 * extra else index - extra
    rounds = []
    for number in range(count):
        there = place ^ 1 << number
        partner = 2 * there if there < extra else there + extra
        move = Move(partner, 0, 1, True, mutual=True)
        rounds.append(Round((move,), (move,), ((0, 1),) if number == count - 1 else ()))
    return tuple(rounds)
