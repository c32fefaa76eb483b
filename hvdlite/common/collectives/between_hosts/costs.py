"""What each collective takes between hosts, by algorithm: a model, and the cheapest by it.

A *round* is the time from the moment in which one rank begins to send a small message until a rank
of another host has it, and sends one itself. A host has one link, which all its ranks share, and
which carries as much in as out at once. While it carries one piece, ranks work on another, so

    seconds = call + rounds x message + blocks x stretch + max(wire, work)

Every time depends on the number of hosts, the bytes of a tensor, and figures that were measured
(``python -m hvdlite.bench``) or are the defaults below. All ranks have the same figures, and use no
function of them but sums, products and comparisons, so that all come to the same choice.
docs/scaling.md compares the model with measurements, and predicts by it. This module does no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import partial

from hvdlite.common.collectives.between_hosts.schedules import doublings, halvings, tree_depth

PIECE_BYTES = 252 << 10
MOST_DOUBLED = 4 << 10  # in bytes, as many tensors are reduced together, and doubling sends most
# What goes inside requests is added up as doubling does it; of one tensor, and of all its members.
MOST_CARRIED, MOST_CARRIED_BY_ALL = 2 << 10, 64 << 10
TREE_PIECES, LEAST_TREE_PIECE = 8, 16 << 10  # of each half of a segment; of a piece, in bytes


@dataclass(frozen=True)
class Model:
    """The figures of a cluster, in seconds."""

    call: float = 100e-6  # software, for each allreduce by one algorithm
    message: float = 150e-6  # one round: a small message from a rank to one of another host
    byte: float = 1 / 1.15e9  # a byte over a host's link, to a host that is near
    far_byte: float = 1.25 / 1.15e9  # the same as halving sends it: far, and in bursts
    reduced_byte: float = 1 / 4e9  # to add a byte that has come; a rank
    copied_byte: float = 1 / 8e9  # to copy a byte into or out of a buffer; a rank
    stretch: float = 1.5e-6  # software, for each block of each tensor
    local_message: float = 30e-6  # one wait for the ranks of the same host
    local_byte: float = 1 / 20e9  # a byte of a tensor in a host, in one half of its work

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the names of the figures, in order."""
        return tuple(field.name for field in fields(cls))

    @property
    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, name) for name in self.names())


@dataclass(frozen=True)
class Cost:
    """Where the time of a collective between hosts goes."""

    rounds: int
    steps: float  # Seconds for the call and the rounds.
    wire: float  # Seconds in which a link is busy.
    work: float  # Seconds in which a rank is.

    @property
    def seconds(self) -> float:
        """Together: the ranks work on pieces while the wire carries others."""
        return self.steps + max(self.wire, self.work)


# -- one function for each algorithm: of the hosts, the ranks of a host that take part, the bytes of
# all blocks together. A gather is the second half of an allreduce, in which nothing is reduced, and
# a scatter the first.


def ring_cost(
    model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1, *,
    reduces: bool = True, gathers: bool = True,
) -> Cost:  # fmt: skip
    """Return the cost of a ring: what comes is added where it is, and copied out."""
    halves, share = reduces + gathers, nbytes * (hosts - 1) / hosts
    work = share / slices * (reduces * model.reduced_byte + gathers * model.copied_byte)
    rounds = halves * (hosts - 1)
    return _cost(model, rounds, halves * share * model.byte, work, hosts * tensors)


def halving_cost(
    model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1, *,
    reduces: bool = True, gathers: bool = True,
) -> Cost:  # fmt: skip
    """Return the cost of halving and doubling: all is loaded first, and most bytes go far."""
    halves, share = reduces + gathers, nbytes * (hosts - 1) / hosts
    copied = (1 + gathers) * nbytes * model.copied_byte
    work = (copied + reduces * share * model.reduced_byte) / slices
    rounds = halves * len([*halvings(hosts)])
    return _cost(model, rounds, halves * share * model.far_byte, work, hosts * tensors)


def tree_piece_bytes(nbytes: float) -> int:
    """Return the bytes of a piece of a tree for a segment: not so few that messages cost more."""
    return int(min(max(nbytes / 2 / TREE_PIECES, LEAST_TREE_PIECE), PIECE_BYTES))


def trees_cost(model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1) -> Cost:
    """Return the cost of two trees: each host sends, and receives, all bytes up and down.

    The first piece takes its own time on each link before it is on the next one.
    """
    rounds = 2 * tree_depth(hosts)
    first = rounds * slices * min(tree_piece_bytes(nbytes / slices), nbytes / 2 / slices)
    sent = 2 * nbytes if hosts > 3 else nbytes * 3 / 2 if hosts > 2 else nbytes
    work = nbytes / slices * (2 * model.copied_byte + model.reduced_byte)
    cost = _cost(model, rounds, sent * model.byte, work, 2 * tensors)
    return replace(cost, steps=cost.steps + first * model.byte)


def doubling_cost(model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1) -> Cost:
    """Return the cost of doubling whole tensors, so small that nothing goes on at the same time."""
    fold = hosts & (hosts - 1) > 0
    times = doublings(hosts) + fold
    wire = times * nbytes * model.far_byte
    # What is sent is a copy.
    work = nbytes / slices * ((2 + times) * model.copied_byte + times * model.reduced_byte)
    cost = _cost(model, times + fold, wire, work, tensors)
    return replace(cost, steps=cost.steps + min(wire, work))


def _cost(model: Model, rounds: int, wire: float, work: float, stretches: int) -> Cost:
    steps = model.call + rounds * model.message + stretches * model.stretch
    return Cost(rounds, steps, wire, work)


def chain_cost(model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1) -> Cost:
    """Return the cost of a broadcast from each host to the next one."""
    return _path_cost(model, hosts - 1, 1, nbytes)


def tree_cost(model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1) -> Cost:
    """Return the cost of a broadcast down one tree: a host sends everything to two others."""
    return _path_cost(model, tree_depth(hosts), 2 if hosts > 2 else 1, nbytes)


def root_and_trees_cost(
    model: Model, hosts: int, slices: int, nbytes: float, tensors: int = 1
) -> Cost:
    """Return the cost of a broadcast down two trees: a host sends one half to two others."""
    return _path_cost(model, 1 + tree_depth(hosts - 1), 1, nbytes)


def _path_cost(model: Model, rounds: int, sends: int, nbytes: float) -> Cost:
    """Return the cost where the first piece takes its time on each link before the next one."""
    first = (rounds - 1) * sends * min(tree_piece_bytes(nbytes), nbytes) * model.byte
    cost = _cost(model, rounds, sends * nbytes * model.byte, nbytes * model.copied_byte, 1)
    return replace(cost, steps=cost.steps + first)


ALLREDUCE = "allreduce"
# By collective, and algorithm; the first one wins a tie. Each is the cost of `tensors` of `nbytes`
# together, between `hosts` with `slices` ranks each.
COSTS: dict[str, dict[str, Callable[..., Cost]]] = {
    ALLREDUCE: {
        "ring": ring_cost,
        "trees": trees_cost,
        "halving": halving_cost,
        "doubling": doubling_cost,
    },
    "gather": {
        "ring": partial(ring_cost, reduces=False),
        "doubling": partial(halving_cost, reduces=False),
    },
    "scatter": {
        "ring": partial(ring_cost, gathers=False),
        "halving": partial(halving_cost, gathers=False),
    },
    "broadcast": {"chain": chain_cost, "tree": tree_cost, "trees": root_and_trees_cost},
}
_OF_TWO = ("ring", "doubling")  # Between two hosts the others do what the ring does.


def cheapest(model: Model, hosts: int, slices: int, nbytes: int) -> str:
    """Return the algorithm of an allreduce that takes the least time, by name."""
    if nbytes <= MOST_CARRIED:
        return "doubling"
    names: Iterable[str] = _OF_TWO if hosts <= 2 else COSTS[ALLREDUCE]
    if nbytes > MOST_DOUBLED:
        names = [name for name in names if name != "doubling"]
    return cheapest_of(model, ALLREDUCE, hosts, slices, nbytes, names)


def cheapest_of(
    model: Model,
    collective: str,
    hosts: int,
    slices: int,
    nbytes: int,
    names: Iterable[str] | None = None,
) -> str:
    """Return the algorithm of a collective that takes the least time, of all or of `names`."""
    costs = COSTS[collective]
    names = costs if names is None else names
    return min(names, key=lambda name: costs[name](model, hosts, slices, nbytes).seconds)


def bundle_is_cheaper(model: Model, here: int, there: int, nbytes: int) -> bool:
    """Return whether to send what ranks of two hosts have for each other as one message.

    A rank then waits for one message instead of one from each rank of the other host, and the
    bytes are copied through the memory of both hosts.
    """
    copied = 2 * nbytes * (model.copied_byte + 2 * model.local_byte)
    return model.message + 4 * model.local_message + copied < max(here, there) * model.message


def step_seconds(
    model: Model, name: str, hosts: tuple[int, ...], nbytes: float, tensors: int = 1
) -> float:
    """Return what an allreduce of `tensors` of `nbytes` together takes by the algorithm `name`.

    `hosts` are the ranks of each. What goes on inside them goes on at the same time as what goes on
    between them.
    """
    between = COSTS[ALLREDUCE][name](model, len(hosts), min(hosts), nbytes, tensors)
    inside = 0.0  # The ranks of a host add up, and share, the segment.
    if max(hosts) > 1:
        inside = 4 * model.local_message + 2 * nbytes * model.local_byte
    return between.steps + max(between.wire, between.work + inside)
