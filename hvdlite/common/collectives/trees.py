r"""Two binary trees, for one half of every tensor each: an allreduce of few rounds.

Sanders, Speck and Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
Parallel Computing 35 (2009). Sums go up a tree to its root and come down again. In one tree half of
the members are leaves, which send their data only once; so there are two trees, and whoever is
inside one is a leaf of the other. Then each member sends as much as it receives.

The first tree has its nodes in order: all on the left of a node have lower numbers, all on its
right have higher ones, and the numbers inside are odd. The second is the first in a mirror if N is
even, and moved by one place if N is odd, which makes the numbers inside even. With 6 and 7 members:

          3                2                    3                    2
        /   \            /   \                /   \                /   \
       1     5          0     4              1     5              0     4
      / \   /            \   / \            / \   / \            / \   / \
     0   2 4              1 3   5          0   2 4   6          6   1 3   5

A node adds the sums of its children to its own values, first that of the left one in the first tree
(of the right one in a mirror). The rounds of member 1 of 7, which is a leaf of the second tree:

    round      first tree                      second tree
    0  up      gets half 0 from 0 and 2        sends half 1 to 0
    1  up      sends half 0 to 3
    2  down    gets half 0 from 3
    3  down    sends half 0 to 0 and 2         gets half 1 from 0

Price, of S bytes and d = ceil(log2 (N+1)) - 1: 2 d rounds. A member sends and receives 2 S bytes
at most: half of S to the parent and two halves to the children in the tree in which it is inside,
and half of S in the other. Four peers at most, most of them near: few edges are long.
"""

from __future__ import annotations

from typing import NamedTuple

from hvdlite.common.collectives.schedule import Move, Round, Schedule


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
    rounds = [_Building() for _ in range(2 * depth)]
    for tree in range(2):
        parent, children, level = place_in_tree(size, tree, index)
        if children:
            up, down = rounds[depth - level - 1], rounds[depth + level]
            up.receives += [Move(child, tree, tree + 1, True) for child in children]
            down.sends += [Move(child, tree, tree + 1, False) for child in children]
            if parent is None:
                up.finished.append((tree, tree + 1))
        if parent is not None:
            rounds[depth - level].sends.append(Move(parent, tree, tree + 1, True))
            rounds[depth + level - 1].receives.append(Move(parent, tree, tree + 1, False))
    return Schedule((0, 1), tuple(each.round for each in rounds), 1)


class _Building:
    """A round while its moves are collected."""

    def __init__(self) -> None:
        self.sends: list[Move] = []
        self.receives: list[Move] = []
        self.finished: list[tuple[int, int]] = []

    @property
    def round(self) -> Round:
        return Round(tuple(self.sends), tuple(self.receives), tuple(self.finished))
