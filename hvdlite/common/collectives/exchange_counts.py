"""The counts of an alltoall over several hosts: what each host sends to each other one.

The ranks of a host tell each other what they send to whom. One of them sends the counts for a host
to the one with the same place there: for the hosts at the distances 1, 2, 3 ... around the ring
of all hosts, the ranks with the places 0, 1, 2 ... take turns. Then they share what has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.layers import Inside, Layers
from hvdlite.common.collectives.pipeline import AHEAD
from hvdlite.common.collectives.slices import one_hot
from hvdlite.common.transport.base import Pending, Transport


class Window:
    """Messages that are under way, in groups, of which only a few are at the same time."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._groups: deque[list[Pending]] = deque()

    def add(self, group: list[Pending]) -> None:
        """Note messages that were started; wait for older ones if there are many."""
        self._groups.append(group)
        if len(self._groups) > AHEAD:
            self._transport.wait(self._groups.popleft())

    def end(self) -> None:
        """Wait for all."""
        while self._groups:
            self._transport.wait(self._groups.popleft())


@dataclass(frozen=True)
class Pair:
    """The hosts at one distance before and behind this one in the ring, and the counts."""

    receiver: int  # the host to which this one sends
    sender: int  # the host that sends to this one
    carrier: int  # the place of the members that speak for their hosts
    sent: Array  # counts: a row for each member of this host, a column for each of the receiver
    came: Array  # counts: a row for each member of the sender, a column for each of this host


def exchange_counts(
    transport: Transport, inside: Inside, layers: Layers, members: Members, counts: Sequence[int]
) -> tuple[Array, list[Pair]]:
    """Return the counts inside this host, a row for each sender, and those of all pairs of hosts.

    `counts` are what this member sends, by position; so is everything that is returned.
    """
    local, hosts = layers.local, layers.hosts
    rows = np.empty((local.size, members.size), np.int64)
    own = np.array(counts, np.int64)
    inside.gather([own], [rows.reshape(-1)], [[members.size] * local.size])
    pairs = [_pair(layers, rows, distance) for distance in range(1, len(hosts))]
    window, given = Window(transport), []
    for pair in pairs:
        if pair.carrier == local.index:
            by, to = hosts[pair.sender][pair.carrier], hosts[pair.receiver][pair.carrier]
            receive = transport.irecv(members.ranks[by], pair.came.reshape(-1))
            window.add([receive, transport.isend(members.ranks[to], pair.sent.reshape(-1))])
            given.append(pair.came.reshape(-1))
    window.end()
    if local.size > 1:
        arrays = [pair.came.reshape(-1) for pair in pairs]
        shares = [one_hot(pair.came.size, pair.carrier, local.size) for pair in pairs]
        inside.gather(given, arrays, shares)
    return rows[:, hosts[layers.host]], pairs


def _pair(layers: Layers, rows: Array, distance: int) -> Pair:
    hosts, host = layers.hosts, layers.host
    receiver, sender = ((host + way * distance) % len(hosts) for way in (1, -1))
    return Pair(
        receiver,
        sender,
        (distance - 1) % layers.slices,
        np.ascontiguousarray(rows[:, hosts[receiver]]),
        np.empty((len(hosts[sender]), layers.local.size), np.int64),
    )
