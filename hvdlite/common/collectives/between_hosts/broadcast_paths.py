"""The ways of a broadcast from host to host: who sends to whom. Data only.

A broadcast is cut into pieces, which take the paths in turns. Hosts are numbered by their distance
from the root, around the ring of all hosts. With 6 hosts:

    chain      0 -> 1 -> 2 -> 3 -> 4 -> 5
    tree       0 -> 1 2, 1 -> 3 4, 2 -> 5
    two trees  0 -> 4, 4 -> 2 5, 2 -> 1 3       for every other piece, and
               0 -> 3 ...                       those of `trees` among the hosts but the root

A chain and two trees send each byte once from each host, a tree twice from those inside; a tree has
the fewest rounds. The second of the two trees is a mirror of the first, or moved by one place: who
is inside one of them is a leaf of the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from hvdlite.common.collectives.between_hosts.schedules import place_in_tree, tree_root


class Path(NamedTuple):
    """How pieces pass one host."""

    parent: int | None  # the number of the host from which they come; None: this is the root
    children: tuple[int, ...]  # the hosts to which they go


def chain(hosts: int, host: int) -> tuple[Path, ...]:
    """Return the path from each host to the next one."""
    return (Path(host - 1 if host else None, (host + 1,) if host + 1 < hosts else ()),)


def tree(hosts: int, host: int) -> tuple[Path, ...]:
    """Return the path down a binary tree without gaps."""
    children = tuple(child for child in (2 * host + 1, 2 * host + 2) if child < hosts)
    return (Path((host - 1) // 2 if host else None, children),)


def root_and_trees(hosts: int, host: int) -> tuple[Path, ...]:
    """Return the paths from the root down two binary trees of all other hosts."""
    others = hosts - 1
    if host == 0:
        return tuple(Path(None, (tree_root(others, each) + 1,)) for each in range(2))
    paths = []
    for each in range(2):
        parent, children, _ = place_in_tree(others, each, host - 1)
        up = 0 if parent is None else parent + 1
        paths.append(Path(up, tuple(child + 1 for child in children)))
    return tuple(paths)


PATHS: dict[str, Callable[[int, int], tuple[Path, ...]]] = {
    "chain": chain,
    "tree": tree,
    "trees": root_and_trees,
}


@lru_cache(maxsize=256)
def paths_of(name: str, hosts: int, root: int, host: int) -> tuple[Path, ...]:
    """Return the paths through `host` of a broadcast from the host `root`."""

    def number(distance: int) -> int:
        return (root + distance) % hosts

    return tuple(
        Path(None if parent is None else number(parent), tuple(map(number, children)))
        for parent, children in PATHS[name](hosts, (host - root) % hosts)
    )
