"""Schedules: which member sends which blocks to whom, round by round. Data only.

Every tensor is cut into as many nearly equal blocks as a schedule has; which block an element is in
depends on its place in its own tensor alone. A member holds the blocks in an order of its own,
`Schedule.layout`, in which all that goes in one message lies side by side. In each round it first
sends, and then receives, in the order of the moves. A partial sum that comes is added to its own;
a block that is finished replaces it. Both ends of a message name the same blocks in the same order.

The members are numbered by their place, host by host: neighbours in number are near each other.
This module never sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Move(NamedTuple):
    """One message, as one of its two ends sees it."""

    peer: int  # the member at the other end
    start: int  # the blocks at the places [start, stop) of the layout
    stop: int
    partial: bool  # whether they are partial sums, which the receiver adds
    # Whether both ends send their sums and go on with the total: both add in the order of their
    # numbers, and what both have sent, so that they have the same bits.
    mutual: bool = False


class Round(NamedTuple):
    """What a member does in one round."""

    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()
    finished: tuple[tuple[int, int], ...] = ()  # places whose sums are complete after the receives


@dataclass(frozen=True)
class Schedule:
    """The rounds of one member; all members have the same number of them."""

    layout: tuple[int, ...]  # the blocks, in the order in which this member holds them
    rounds: tuple[Round, ...]
    widest: int  # blocks of the longest message of any member

    @cached_property
    def reduces(self) -> bool:
        """Whether anything is added; else blocks are gathered."""
        return any(move.partial for each in self.rounds for move in each.sends)

    @cached_property
    def peers(self) -> frozenset[int]:
        """The members that this one talks to: each is a connection."""
        moves = (move for each in self.rounds for move in (*each.sends, *each.receives))
        return frozenset(move.peer for move in moves)


Scheduler = Callable[[int, int], Schedule]  # It takes the number of members, and a member.


# Recursive halving and doubling: an allreduce in 2 log2 N rounds, among any number of members.
#
# That of Rabenseifner, "Optimization of collective reduction operations", ICCS 2004, halves what a
# pair of members holds and needs a power of two. Here the members stand in a ring and send forward
# by the kept half: Traeff, "Optimal, non-pipelined reduce-scatter and allreduce algorithms" (2024).
# It has no more rounds and sends no more bytes, however many members there are.
#
# Member i holds the blocks i, i+1, ... (modulo N). With n of them held and k = ceil(n / 2) kept, it
# sends those at the places k to n-1 to member i+k, for which they are the places 0 to n-k-1, and
# adds what member i-k sends to its own places 0 to n-k-1. The last one that is left is finished.
# The way back is the same in reverse: with 5 members, as member 0 sees it,
#
#     round      held      sends the places    to    gets the places    from
#     0  halve   5 -> 3    3 4  partial         3     0 1  added          2
#     1  halve   3 -> 2    2    partial         2     0    added          3
#     2  halve   2 -> 1    1    partial         1     0    added          4    0 is finished
#     3  double  1 -> 2    0    finished        4     1    copied         1
#     4  double  2 -> 3    0    finished        3     2    copied         2
#     5  double  3 -> 5    0 1  finished        2     3 4  copied         3
#
# Price, of S bytes: 2 ceil(log2 N) messages, and 2 (N-1)/N S bytes, the least there is. Each member
# has 2 ceil(log2 N) peers at most, and half of all bytes go half way around the ring.


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


# Recursive doubling of whole tensors: an allreduce in log2 N rounds, for tensors of a few KiB.
#
# In each round a member and its partner send each other all that they have added up, and both add
# it in the order of their numbers, so that both have the same bits: a tree of sums without a root.
# See Thakur, Rabenseifner and Gropp, "Optimization of collective communication operations in MPICH"
# (2005). With 4 members:
#
#     round 0     0 <-> 1     2 <-> 3     all have (0+1) or (2+3)
#     round 1     0 <-> 2     1 <-> 3     all have (0+1)+(2+3)
#
# It needs a power of two. Of N members, N - 2^k first send theirs to the member before them, and
# get the result at the end: two rounds more. With 3 members:
#
#     round 0     1 --> 0
#     round 1     0 <-> 2
#     round 2     0 --> 1
#
# Price, of S bytes: ceil(log2 N) rounds of S bytes in and out, and one more where N is no power of
# two. Trees and halving take twice as many rounds, and fewer bytes.


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


# Two binary trees, for one half of every tensor each: an allreduce of few rounds.
#
# Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
# Parallel Computing 35 (2009). Sums go up a tree to its root and come down again. In one tree half
# of the members are leaves, which send their data only once; so there are two trees, and whoever is
# inside one is a leaf of the other. Then each member sends as much as it receives.
#
# The first tree has its nodes in order: all on the left of a node have lower numbers, all on its
# right have higher ones, and the numbers inside are odd. The second is the first in a mirror if N
# is even, and moved by one place if N is odd, which makes the numbers inside even. With 6 and 7
# members:
#
#           3                2                    3                    2
#         /   \            /   \                /   \                /   \
#        1     5          0     4              1     5              0     4
#       / \   /            \   / \            / \   / \            / \   / \
#      0   2 4              1 3   5          0   2 4   6          6   1 3   5
#
# A node adds the sums of its children to its own values, first that of the left one in the first
# tree (of the right one in a mirror). The rounds of member 1 of 7, which is a leaf of the second
# tree:
#
#     round      first tree                      second tree
#     0  up      gets half 0 from 0 and 2        sends half 1 to 0
#     1  up      sends half 0 to 3
#     2  down    gets half 0 from 3
#     3  down    sends half 0 to 0 and 2         gets half 1 from 0
#
# Price, of S bytes and d = ceil(log2 (N+1)) - 1: 2 d rounds. A member sends and receives 2 S bytes
# at most: half of S to the parent and two halves to the children in the tree in which it is inside,
# and half of S in the other. Four peers at most, most of them near: few edges are long.


class Place(NamedTuple):
    """Where a node is in the tree: the numbers of its parent and children."""

    parent: int | None
    children: tuple[int, ...]  # the left one first
    level: int  # of the root: 0


def tree_depth(size: int) -> int:
    """Return the number of levels below the root."""
    return size.bit_length() - 1


def in_order_place(size: int, node: int) -> Place:
    """Return the place of `node` in the tree in order of `size` nodes."""
    first, count, parent, level = 0, size, None, 0
    while True:
        left = _left(count)
        root = first + left
        if node == root:
            break
        parent, level = root, level + 1
        if node < root:
            count = left
        else:
            first, count = root + 1, count - left - 1
    right = count - left - 1
    children = []
    if left:
        children.append(first + _left(left))
    if right:
        children.append(root + 1 + _left(right))
    return Place(parent, tuple(children), level)


def _left(count: int) -> int:
    """Return the size of the left subtree of `count` nodes, in which no place is empty."""
    return (1 << (count.bit_length() - 1)) - 1


def place_in_tree(size: int, tree: int, member: int) -> Place:
    """Return the place of `member` in the first or the second tree."""
    if not tree:
        return in_order_place(size, member)
    node = size - 1 - member if size % 2 == 0 else (member + 1) % size
    place = in_order_place(size, node)
    parent = None if place.parent is None else _second(size, place.parent)
    return Place(parent, tuple(_second(size, child) for child in place.children), place.level)


def tree_root(size: int, tree: int) -> int:
    """Return the member that is the root of the first or the second tree."""
    return _second(size, _left(size)) if tree else _left(size)


def _second(size: int, node: int) -> int:
    """Return the member at a node of the second tree."""
    return size - 1 - node if size % 2 == 0 else (node - 1) % size


def two_trees(size: int, index: int) -> Schedule:
    """Return the schedule of member `index` of `size`: a block for each tree."""
    depth = tree_depth(size)
    # Of each round, while its moves are collected.
    sends: list[list[Move]] = [[] for _ in range(2 * depth)]
    receives: list[list[Move]] = [[] for _ in range(2 * depth)]
    finished: list[list[tuple[int, int]]] = [[] for _ in range(2 * depth)]
    for tree in range(2):
        parent, children, level = place_in_tree(size, tree, index)
        if children:
            up, down = depth - level - 1, depth + level
            receives[up] += [Move(child, tree, tree + 1, True) for child in children]
            sends[down] += [Move(child, tree, tree + 1, False) for child in children]
            if parent is None:
                finished[up].append((tree, tree + 1))
        if parent is not None:
            sends[depth - level].append(Move(parent, tree, tree + 1, True))
            receives[depth + level - 1].append(Move(parent, tree, tree + 1, False))
    rounds = zip(map(tuple, sends), map(tuple, receives), map(tuple, finished), strict=True)
    return Schedule((0, 1), tuple(Round(*each) for each in rounds), 1)
