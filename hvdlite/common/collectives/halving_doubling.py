"""Recursive halving and doubling: an allreduce in 2 log2 N rounds, among any number of members.

That of Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, halves what a
pair of members holds and needs a power of two. Here the members stand in a ring and send forward
by the kept half: Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms" (2024).
It has no more rounds and sends no more bytes, however many members there are.

Member i holds the blocks i, i+1, ... (modulo N). With n of them held and k = ceil(n / 2) kept, it
sends those at the places k to n-1 to member i+k, for which they are the places 0 to n-k-1, and adds
what member i-k sends to its own places 0 to n-k-1. The last one that is left is finished. The way
back is the same in reverse: with 5 members, as member 0 sees it,

    round      held      sends the places    to    gets the places    from
    0  halve   5 -> 3    3 4  partial         3     0 1  added          2
    1  halve   3 -> 2    2    partial         2     0    added          3
    2  halve   2 -> 1    1    partial         1     0    added          4    0 is finished
    3  double  1 -> 2    0    finished        4     1    copied         1
    4  double  2 -> 3    0    finished        3     2    copied         2
    5  double  3 -> 5    0 1  finished        2     3 4  copied         3

Price, of S bytes: 2 ceil(log2 N) messages, and 2 (N-1)/N S bytes, the least there is. Each member
has 2 ceil(log2 N) peers at most, and half of all bytes go half way around the ring.
"""

from __future__ import annotations

from collections.abc import Iterator

from hvdlite.common.collectives.schedule import Move, Round, Schedule


def halvings(size: int) -> Iterator[tuple[int, int]]:
    """Yield how many blocks a member keeps, and of how many, in each round of the first half."""
    held = size
    while held > 1:
        kept = -(-held // 2)
        yield kept, held
        held = kept


def halving_doubling(size: int, index: int) -> Schedule:
    """Return the schedule of member `index` of `size`: a block for each member."""
    halves, doubles = _rounds(size, index)
    return _schedule(size, index, halves + doubles)


def halving(size: int, index: int) -> Schedule:
    """Return the first half: a reducescatter, after which member `index` has its own block."""
    return _schedule(size, index, _rounds(size, index)[0])


def doubling(size: int, index: int) -> Schedule:
    """Return the second half: an allgather of the blocks of all members."""
    return _schedule(size, index, _rounds(size, index)[1])


def _schedule(size: int, index: int, rounds: list[Round]) -> Schedule:
    layout = tuple((index + place) % size for place in range(size))
    return Schedule(layout, tuple(rounds), max(1, size // 2))


def _rounds(size: int, index: int) -> tuple[list[Round], list[Round]]:
    """Return the rounds of both halves."""
    halves, doubles = [], []
    for kept, held in halvings(size):
        ahead, behind, moved = (index + kept) % size, (index - kept) % size, held - kept
        halves.append(
            Round(
                (Move(ahead, kept, held, True),),
                (Move(behind, 0, moved, True),),
                ((0, 1),) if kept == 1 else (),
            )
        )
        doubles.append(Round((Move(behind, 0, moved, False),), (Move(ahead, kept, held, False),)))
    return halves, doubles[::-1]
