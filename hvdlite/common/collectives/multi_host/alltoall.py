"""Alltoall over several hosts: by shared memory inside a host, and in few messages between hosts.

What a host sends to another one is either sent by each rank to each rank, straight from memory to
memory, or in one bundle: the ranks of the host give it to one of them, which sends it to a rank of
the other host, which hands it out. A bundle has fewer messages and more copies, so it is for small
data. Both hosts know the counts of all their ranks, and so make the same choice; it may be another
one for each pair of hosts, and for each direction.

With L ranks on each of H hosts a rank sends (H-1) L messages, and in bundles some (H-1) / L.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from hvdlite.common.collectives.base import Array, Members
from hvdlite.common.collectives.between_hosts.costs import Model, bundle_is_cheaper
from hvdlite.common.collectives.between_hosts.pipeline import AHEAD
from hvdlite.common.collectives.multi_host.host_slices import Inside, Layers, one_hot
from hvdlite.common.transport.base import Pending, Transport

# The counts of an alltoall over several hosts: what each host sends to each other one.
#
# The ranks of a host tell each other what they send to whom. One of them sends the counts for a
# host to the one with the same place there: for the hosts at the distances 1, 2, 3 ... around the
# ring of all hosts, the ranks with the places 0, 1, 2 ... take turns. Then they share what has
# come.


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


class _Way(NamedTuple):
    """How the data of a pair of hosts go: each direction by itself."""

    pair: Pair
    bundle_sent: bool
    bundle_comes: bool


class HostExchange:
    """One alltoall at one rank."""

    def __init__(
        self,
        transport: Transport,
        inside: Inside,
        layers: Layers,
        members: Members,
        model: Model,
    ) -> None:
        """Send in bundles what that is cheaper for by `model`."""
        self._transport, self._inside, self._layers = transport, inside, layers
        self._members = members
        self._model = model

    def run(
        self,
        array: Array,
        send_counts: Sequence[int],
        allocate: Callable[[list[int]], Array],
    ) -> None:
        local, hosts = self._layers.local, self._layers.hosts
        inner, pairs = exchange_counts(
            self._transport, self._inside, self._layers, self._members, send_counts
        )
        received = [0] * self._members.size
        for place, position in enumerate(hosts[self._layers.host]):
            received[position] = int(inner[place, local.index])
        for pair in pairs:
            for place, position in enumerate(hosts[pair.sender]):
                received[position] = int(pair.came[place, local.index])
        output = allocate(received)
        self._parts, self._slots = _cut(array, send_counts), _cut(output, received)
        self._dtype = array.dtype
        itemsize = array.itemsize
        plan = [
            _Way(pair, self._is_bundle(pair.sent, itemsize), self._is_bundle(pair.came, itemsize))
            for pair in pairs
        ]
        window = Window(self._transport)
        for way in plan:
            window.add([*self._receives(way), *self._sends(way)])
        self._exchange_inside(array, output)
        window.end()
        self._exchange_bundles(plan)

    def _is_bundle(self, counts: Array, itemsize: int) -> bool:
        elements = int(counts.sum())
        nbytes = elements * itemsize
        return elements > 0 and bundle_is_cheaper(self._model, len(counts), counts.shape[1], nbytes)

    # -- from rank to rank

    def _receives(self, way: _Way) -> Iterator[Pending]:
        for position in () if way.bundle_comes else self._turned(way.pair.sender):
            if self._slots[position].size:
                rank = self._members.ranks[position]
                yield self._transport.irecv(rank, self._slots[position])

    def _sends(self, way: _Way) -> Iterator[Pending]:
        for position in () if way.bundle_sent else self._turned(way.pair.receiver):
            if self._parts[position].size:
                rank = self._members.ranks[position]
                yield self._transport.isend(rank, self._parts[position])

    def _turned(self, host: int) -> Iterator[int]:
        """Yield the members of a host; each rank of this host begins with another one."""
        positions = self._layers.hosts[host]
        for place in range(len(positions)):
            yield positions[(place + self._layers.local.index) % len(positions)]

    def _exchange_inside(self, source: Array, target: Array) -> None:
        """Exchange what stays on this host; straight where it lies in one place."""
        positions = self._layers.hosts[self._layers.host]
        parts = [self._parts[position] for position in positions]
        slots = [self._slots[position] for position in positions]
        first, last = positions[0], positions[-1]
        if last - first + 1 != len(positions):
            _unpack(self._exchanged(parts, [part.size for part in parts]), slots)
            return
        before = (sum(each.size for each in every[:first]) for every in (self._parts, self._slots))
        start, target_start = before
        size = sum(slot.size for slot in slots)
        self._inside.exchange(
            source[start:],
            [part.size for part in parts],
            lambda counts: target[target_start : target_start + size],
        )

    # -- in bundles

    def _exchange_bundles(self, plan: Sequence[_Way]) -> None:
        """Exchange what goes in bundles, those of some hosts by each rank."""
        sent = [way.pair for way in plan if way.bundle_sent]
        came = [way.pair for way in plan if way.bundle_comes]
        bundles = self._collected(sent) if sent else {}
        window, arrived = Window(self._transport), {}
        for pair, bundle_sent, bundle_comes in plan:
            if pair.carrier != self._layers.local.index:
                continue
            group: list[Pending] = []
            if bundle_comes:
                bundle = arrived[pair.sender] = np.empty(int(pair.came.sum()), self._dtype)
                group.append(self._transport.irecv(self._carrier(pair, pair.sender), bundle))
            if bundle_sent:
                bundle = bundles[pair.receiver]
                group.append(self._transport.isend(self._carrier(pair, pair.receiver), bundle))
            window.add(group)
        window.end()
        if came:
            self._hand_out(came, arrived)

    def _carrier(self, pair: Pair, host: int) -> int:
        """Return the rank that speaks for another host."""
        return self._members.ranks[self._layers.hosts[host][pair.carrier]]

    def _collected(self, sent: Sequence[Pair]) -> dict[int, Array]:
        """Give the parts to the ranks that send them; return the bundles of this one, by host."""
        hosts, local = self._layers.hosts, self._layers.local
        given: list[Array] = []
        counts = [0] * local.size
        for carrier in range(local.size):
            for pair in sent:
                if pair.carrier == carrier:
                    parts = [self._parts[position] for position in hosts[pair.receiver]]
                    counts[carrier] += sum(part.size for part in parts)
                    given += parts
        mine = [pair for pair in sent if pair.carrier == local.index]
        got = self._exchanged(given, counts)
        sizes = [int(pair.sent[place].sum()) for place in range(local.size) for pair in mine]
        parts = _cut(got, sizes)
        return {
            pair.receiver: np.concatenate(parts[number :: len(mine)])
            for number, pair in enumerate(mine)
        }

    def _hand_out(self, came: Sequence[Pair], arrived: Mapping[int, Array]) -> None:
        """Give the parts of the bundles that this rank has got to their owners, and get its own."""
        local = self._layers.local
        mine = [pair for pair in came if pair.carrier == local.index]
        parts = {
            pair.sender: _cut(arrived[pair.sender], pair.came.reshape(-1).tolist()) for pair in mine
        }
        given: list[Array] = []
        counts = [0] * local.size
        for place in range(local.size):
            for pair in mine:
                own = parts[pair.sender][place :: local.size]
                counts[place] += sum(part.size for part in own)
                given += own
        slots = [
            self._slots[position]
            for carrier in range(local.size)
            for pair in came
            if pair.carrier == carrier
            for position in self._layers.hosts[pair.sender]
        ]
        _unpack(self._exchanged(given, counts), slots)

    def _exchanged(self, given: Sequence[Array], counts: Sequence[int]) -> Array:
        """Return what the ranks of this host give to this one, one behind the other."""
        memory: list[Array] = []

        def allocate(received: list[int]) -> Array:
            memory.append(np.empty(sum(received), self._dtype))
            return memory[0]

        source = np.concatenate([np.empty(0, self._dtype), *given])
        self._inside.exchange(source, counts, allocate)
        return memory[0]


def _cut(array: Array, sizes: Sequence[int]) -> list[Array]:
    ends = list(accumulate(sizes, initial=0))
    return [array[start:stop] for start, stop in pairwise(ends)]


def _unpack(source: Array, targets: Sequence[Array]) -> None:
    for part, target in zip(_cut(source, [each.size for each in targets]), targets, strict=True):
        np.copyto(target, part)
