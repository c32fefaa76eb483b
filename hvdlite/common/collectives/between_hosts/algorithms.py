"""The algorithms between hosts, by name, and the choice among them.

Which algorithm reduces a tensor depends on its own bytes, the hosts of the members and the model
alone, never on what it is fused with: another algorithm adds in another order. So a segment may be
reduced in up to as many parts as there are algorithms, small tensors in trees and large ones in a
ring, say; each part is one run, however many tensors it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.between_hosts.costs import (
    ALLREDUCE,
    COSTS,
    Model,
    cheapest,
    cheapest_of,
    tree_piece_bytes,
)
from hvdlite.common.collectives.between_hosts.pipeline import Pipeline, RingOrder, RingPlan
from hvdlite.common.collectives.between_hosts.schedule_run import ScheduledPlan
from hvdlite.common.collectives.between_hosts.schedules import (
    Schedule,
    Scheduler,
    doubling,
    halving,
    halving_doubling,
    place_in_tree,
    recursive_doubling,
    tree_root,
    two_trees,
)

# -- the ways of a broadcast from host to host: who sends to whom

# A broadcast is cut into pieces, which take the paths in turns. Hosts are numbered by their
# distance from the root, around the ring of all hosts. With 6 hosts:
#
#     chain      0 -> 1 -> 2 -> 3 -> 4 -> 5
#     tree       0 -> 1 2, 1 -> 3 4, 2 -> 5
#     two trees  0 -> 4, 4 -> 2 5, 2 -> 1 3       for every other piece, and
#                0 -> 3 ...                       those of `trees` among the hosts but the root
#
# A chain and two trees send each byte once from each host, a tree twice from those inside; a tree
# has the fewest rounds. The second of the two trees is a mirror of the first, or moved by one
# place: who is inside one of them is a leaf of the other.


class Path(NamedTuple):
    """How pieces pass one host."""

    parent: int | None  # the number of the host from which they come; None: this is the root
    children: tuple[int, ...]  # the hosts to which they go


def chain(hosts: int, host: int) -> tuple[Path, ...]:
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


MOST_CUT = 64  # A message of many blocks may be larger than a piece: a block is cut no smaller.


@dataclass(frozen=True)
class Algorithm:
    """One way to reduce among one member of each host."""

    name: str
    scheduler: Scheduler | None  # None: the ring, which has a pipeline of its own
    pipelined: bool = (
        False  # whether all bytes of a block make each step: small pieces are sooner up
    )
    reduces: bool = True  # False: the second half of an allreduce, which only gathers
    gathers: bool = True  # False: the first half, after which each host has its own block

    @property
    def phase(self) -> str:
        return self.name.upper()

    def schedule(self, order: RingOrder) -> Schedule | None:
        """Return what this member does; None for the ring."""
        if self.scheduler is None:
            return None
        return _scheduled(self.scheduler, len(order.order), order.index)

    def blocks(self, order: RingOrder) -> int:
        """Return into how many blocks a tensor is cut."""
        schedule = self.schedule(order)
        return len(order.order) if schedule is None else len(schedule.layout)

    def length(self, order: RingOrder, piece_bytes: int, itemsize: int, elements: int) -> int:
        """Return the elements of a piece of a block: a message has at most `piece_bytes`.

        `elements` are those of all tensors at one member.
        """
        schedule = self.schedule(order)
        cut = 1 if schedule is None else min(schedule.widest, MOST_CUT)
        nbytes = piece_bytes // cut
        if self.pipelined:
            nbytes = min(nbytes, tree_piece_bytes(elements * itemsize))
        return max(1, nbytes // itemsize)

    def plan(self, order: RingOrder, **fields: Any) -> Pipeline:
        """Return the allreduce with these `fields` of a `Pipeline`."""
        schedule = self.schedule(order)
        if schedule is None:
            steps = len(order.order) - 1
            return RingPlan(
                ring_order=order, reduce_steps=self.reduces * steps,
                gather_steps=self.gathers * steps, shift=not self.gathers, **fields,
            )  # fmt: skip
        return ScheduledPlan(ring_order=order, schedule_of_member=schedule, **fields)


@lru_cache(maxsize=64)
def _scheduled(scheduler: Scheduler, size: int, index: int) -> Schedule:
    return scheduler(size, index)


RING = Algorithm("ring", None)
ALGORITHMS = {
    each.name: each
    for each in (
        RING,
        Algorithm("trees", two_trees, pipelined=True),
        Algorithm("halving", halving_doubling),
        Algorithm("doubling", recursive_doubling),
    )
}
assert ALGORITHMS.keys() == COSTS[ALLREDUCE].keys()
GATHERS = {
    "ring": Algorithm("ring", None, reduces=False),
    "doubling": Algorithm("doubling", doubling, reduces=False),
}
assert GATHERS.keys() == COSTS["gather"].keys()
SCATTERS = {
    "ring": Algorithm("ring", None, gathers=False),
    "halving": Algorithm("halving", halving, gathers=False),
}
assert SCATTERS.keys() == COSTS["scatter"].keys()
assert PATHS.keys() == COSTS["broadcast"].keys()


class Choice:
    """The choice of the algorithm for a tensor: a fixed one, or the cheapest by the model."""

    def __init__(self, fixed: str = "", model: Model | None = None) -> None:
        """Choose by `model` (default: its defaults) unless `fixed` names an algorithm."""
        self._fixed = ALGORITHMS.get(fixed)
        self.set_model(model or Model())

    def set_model(self, model: Model) -> None:
        """Choose by `model` from now on. All ranks call this between the same two collectives."""
        self.model = model
        self._cheapest = lru_cache(maxsize=4096)(
            lambda hosts, slices, nbytes: ALGORITHMS[cheapest(model, hosts, slices, nbytes)]
        )
        self._cheapest_of = lru_cache(maxsize=4096)(partial(cheapest_of, model))

    def of(self, hosts: int, slices: int, nbytes: int) -> Algorithm:
        """Return the algorithm for a tensor of `nbytes`, of which each host has `slices` parts."""
        return self._fixed or self._cheapest(hosts, slices, nbytes)

    def gather(self, hosts: int, slices: int, nbytes: int) -> Algorithm:
        """Return the algorithm of an allgather with results of `nbytes`."""
        return GATHERS[self._cheapest_of("gather", hosts, slices, nbytes)]

    def path(self, hosts: int, nbytes: int) -> str:
        """Return the way of a broadcast of `nbytes`, as `paths_of` takes it."""
        return self._cheapest_of("broadcast", hosts, 1, nbytes)

    def groups(
        self, hosts: int, slices: int, tensors: Sequence[Array]
    ) -> dict[Algorithm, list[int]]:
        """Return the tensors by algorithm, by their numbers; all members get the same order."""
        return _groups(ALGORITHMS, [self.of(hosts, slices, tensor.nbytes) for tensor in tensors])

    def scatter_groups(
        self, hosts: int, slices: int, tensors: Sequence[Array]
    ) -> dict[Algorithm, list[int]]:
        """Return the tensors of a reducescatter by algorithm, as `groups`."""
        names = (self._cheapest_of("scatter", hosts, slices, each.nbytes) for each in tensors)
        return _groups(SCATTERS, [SCATTERS[name] for name in names])


def _groups(
    order: Mapping[str, Algorithm], chosen: Sequence[Algorithm]
) -> dict[Algorithm, list[int]]:
    found: dict[Algorithm, list[int]] = {}
    for number, algorithm in enumerate(chosen):
        found.setdefault(algorithm, []).append(number)
    return {each: found[each] for each in order.values() if each in found}
