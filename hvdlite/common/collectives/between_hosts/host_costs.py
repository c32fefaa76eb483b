"""What the other collectives take between hosts: the model of `costs`, and the cheapest by it.

A gather is the second half of an allreduce and a scatter the first, so they have half its rounds,
and send half as much. `nbytes` are those of all blocks together, and in an exchange (alltoall) what
each rank sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hvdlite.common.collectives.between_hosts.costs import (
    Cost,
    Model,
    inside_hosts,
    tree_piece_bytes,
)
from hvdlite.common.collectives.between_hosts.pipeline import AHEAD
from hvdlite.common.collectives.between_hosts.schedules import halvings, tree_depth

Costs = dict[str, Callable[[Model, int, int, float], Cost]]  # The first one wins a tie.
PathCosts = dict[str, Callable[[Model, int, float], Cost]]


def ring_gather_cost(model: Model, hosts: int, slices: int, nbytes: float) -> Cost:
    """Return the cost of blocks that go around a ring of hosts, and are copied where they come."""
    share = nbytes * (hosts - 1) / hosts
    work = share / slices * model.copied_byte
    return Cost(hosts - 1, _steps(model, hosts - 1, hosts), share * model.byte, work)


def doubling_cost(model: Model, hosts: int, slices: int, nbytes: float) -> Cost:
    """Return the cost of doubling, for which all is copied in and out, and most bytes go far."""
    rounds, share = len([*halvings(hosts)]), nbytes * (hosts - 1) / hosts
    work = 2 * nbytes / slices * model.copied_byte
    return Cost(rounds, _steps(model, rounds, hosts), share * model.far_byte, work)


def ring_scatter_cost(model: Model, hosts: int, slices: int, nbytes: float) -> Cost:
    """Return the cost of sums that go around a ring of hosts."""
    share = nbytes * (hosts - 1) / hosts
    work = share / slices * model.reduced_byte
    return Cost(hosts - 1, _steps(model, hosts - 1, hosts), share * model.byte, work)


def halving_scatter_cost(model: Model, hosts: int, slices: int, nbytes: float) -> Cost:
    """Return the cost of halving, for which all is copied first, and most bytes go far."""
    rounds, share = len([*halvings(hosts)]), nbytes * (hosts - 1) / hosts
    work = (nbytes * model.copied_byte + share * model.reduced_byte) / slices
    return Cost(rounds, _steps(model, rounds, hosts), share * model.far_byte, work)


def chain_cost(model: Model, hosts: int, nbytes: float) -> Cost:
    """Return the cost of a broadcast from each host to the next one."""
    return _path_cost(model, hosts - 1, 1, nbytes)


def tree_cost(model: Model, hosts: int, nbytes: float) -> Cost:
    """Return the cost of a broadcast down one tree: a host sends everything to two others."""
    return _path_cost(model, tree_depth(hosts), 2 if hosts > 2 else 1, nbytes)


def root_and_trees_cost(model: Model, hosts: int, nbytes: float) -> Cost:
    """Return the cost of a broadcast down two trees: a host sends one half to two others."""
    return _path_cost(model, 1 + tree_depth(hosts - 1), 1, nbytes)


def _path_cost(model: Model, rounds: int, sends: int, nbytes: float) -> Cost:
    """Return the cost where the first piece takes its time on each link before the next one."""
    first = (rounds - 1) * sends * min(tree_piece_bytes(nbytes), nbytes) * model.byte
    wire = sends * nbytes * model.byte
    return Cost(rounds, _steps(model, rounds, 1) + first, wire, nbytes * model.copied_byte)


def direct_exchange_cost(model: Model, hosts: int, slices: int, nbytes: float) -> Cost:
    """Return the cost of an alltoall in which each rank sends to each rank of other hosts."""
    rounds = _windows(_counts_of(hosts, slices)) + _windows(hosts - 1)
    messages = _counts_of(hosts, slices) + (hosts - 1) * slices
    return _exchange_cost(model, rounds, messages, hosts, slices, nbytes, nbytes)


def bundled_exchange_cost(model: Model, hosts: int, slices: int, nbytes: float) -> Cost:
    """Return the cost of an alltoall in which a host sends one message to each other one.

    The ranks of a host collect what is in it, and hand out what has come.
    """
    bundles = _counts_of(hosts, slices)
    far = nbytes * (hosts - 1) / hosts
    cost = _exchange_cost(
        model, 2 * _windows(bundles), 2 * bundles, hosts, slices, nbytes, nbytes + 4 * far
    )
    inside = 4 * model.local_message + 4 * far * slices * model.local_byte
    return replace(cost, steps=cost.steps + inside)


def _exchange_cost(
    model: Model, rounds: int, messages: int, hosts: int, slices: int, nbytes: float, copied: float
) -> Cost:
    """Return the cost of an alltoall: counts first, then the data, a few hosts at a time."""
    wire = slices * nbytes * (hosts - 1) / hosts * model.far_byte
    steps = _steps(model, rounds, 2 * messages)
    if slices > 1:  # The ranks of a host tell each other the counts.
        steps += 4 * model.local_message
    return Cost(rounds, steps, wire, copied * model.copied_byte)


def _counts_of(hosts: int, slices: int) -> int:
    """Return for how many other hosts a rank of a host with `slices` speaks, at most."""
    return -(-(hosts - 1) // slices)


def _windows(hosts: int) -> int:
    """Return how often a rank waits that exchanges with so many hosts; see `Window`."""
    return -(-hosts // (AHEAD + 1))


def _steps(model: Model, rounds: int, stretches: int) -> float:
    return model.call + rounds * model.message + stretches * model.stretch


GATHER_COSTS: Costs = {"ring": ring_gather_cost, "doubling": doubling_cost}
SCATTER_COSTS: Costs = {"ring": ring_scatter_cost, "halving": halving_scatter_cost}
BROADCAST_COSTS: PathCosts = {
    "chain": chain_cost, "tree": tree_cost, "trees": root_and_trees_cost,
}  # fmt: skip
EXCHANGE_COSTS: Costs = {"direct": direct_exchange_cost, "bundles": bundled_exchange_cost}
_BLOCKS = {"gather": GATHER_COSTS, "scatter": SCATTER_COSTS, "exchange": EXCHANGE_COSTS}
COLLECTIVES = (*_BLOCKS, "broadcast")


def cheapest_path(model: Model, hosts: int, nbytes: int) -> str:
    """Return the way of a broadcast that takes the least time, by name."""
    return min(
        BROADCAST_COSTS, key=lambda name: BROADCAST_COSTS[name](model, hosts, nbytes).seconds
    )


def cheapest_of(costs: Costs, model: Model, hosts: int, slices: int, nbytes: int) -> str:
    """Return the gather or scatter that takes the least time, by name."""
    return min(costs, key=lambda name: costs[name](model, hosts, slices, nbytes).seconds)


def collective_way(collective: str, model: Model, hosts: tuple[int, ...], nbytes: int) -> str:
    """Return the cheapest way of one of `COLLECTIVES`, by name; all blocks are of one size."""
    if collective == "broadcast":
        return cheapest_path(model, len(hosts), nbytes)
    if collective == "exchange":
        ranks = min(hosts)
        bundled = bundle_is_cheaper(model, ranks, ranks, ranks * nbytes // len(hosts))
        return "bundles" if bundled else "direct"
    return cheapest_of(_BLOCKS[collective], model, len(hosts), min(hosts), nbytes)


def collective_seconds(collective: str, model: Model, hosts: tuple[int, ...], nbytes: int) -> float:
    """Return what a collective takes by the cheapest way; `hosts` are the ranks of each.

    Inside the hosts it does one half of the work of an allreduce, at the same time.
    """
    way = collective_way(collective, model, hosts, nbytes)
    if collective == "broadcast":
        cost = BROADCAST_COSTS[way](model, len(hosts), nbytes)
    else:
        cost = _BLOCKS[collective][way](model, len(hosts), min(hosts), nbytes)
    inside = inside_hosts(model, max(hosts), nbytes) / 2
    return cost.steps + max(cost.wire, cost.work + inside)


def bundle_is_cheaper(model: Model, here: int, there: int, nbytes: int) -> bool:
    """Return whether to send what ranks of two hosts have for each other as one message.

    A rank then waits for one message instead of one from each rank of the other host, and the
    bytes are copied through the memory of both hosts.
    """
    copied = 2 * nbytes * (model.copied_byte + 2 * model.local_byte)
    return model.message + 4 * model.local_message + copied < max(here, there) * model.message
