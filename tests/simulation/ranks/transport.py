"""The network of a world: every pair of ranks has connections with latencies of their own.

Nothing overtakes on one connection; messages, arrays and tokens have one each, so these overtake
each other, and so do the connections of different pairs. A process that ends closes its
connections, which its peers see after what it had sent before. A host that is lost says nothing:
its peers see that after `SILENCE_SECONDS`. Where nothing arrives in one direction any more, no
answers do either, and both ends see that within the same time, each by itself.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Set
from functools import partial

from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.transport.base import CHECK_SECONDS, Array, Incoming, Pending, connection_lost
from hvdlite.common.transport.inprocess import (
    ARRAYS,
    MESSAGES,
    TOKENS,
    InProcessTransport,
    InProcessWorld,
    Offer,
)
from tests.simulation.lines import Line, Wire
from tests.simulation.world import Action, Process, World

SILENCE_SECONDS = 1.0


class Network:
    """The connections between the ranks of one job."""

    def __init__(
        self,
        world: World,
        topology: Topology,
        *,
        fan_out: int,
        latency: float,
        bytes_per_second: float,
        eager_bytes: int,
    ) -> None:
        """Arrays up to `eager_bytes` are copied when they are sent, larger ones on arrival."""
        self.topology = topology
        self.within = InProcessWorld(topology)
        self.eager_bytes = eager_bytes
        self._world = world
        self._latency = latency
        self._lines: dict[tuple[int, int, str], Line] = defaultdict(Line)
        self._wires = [Wire(bytes_per_second) for _ in topology.hosts]
        self._stalls: dict[tuple[int, int], float] = defaultdict(float)  # Source, target -> end.
        self._cuts: set[tuple[int, int]] = set()
        self._mutes: set[tuple[int, int]] = set()  # Source, target: nothing arrives any more.
        self._with_arrays: dict[int, set[int]] = defaultdict(set)
        # Rank -> after how long its peers see that, and the time by which all can.
        self._gone: dict[int, tuple[float, float]] = {}
        self._trees = [Tree(topology, rank, fan_out) for rank in range(topology.size)]
        self.ends = [SimulatedTransport(world, self, rank) for rank in range(topology.size)]

    def neighbours(self, rank: int) -> Set[int]:
        """Return the ranks with which a rank exchanges control messages."""
        return self._trees[rank].neighbours

    def carry(self, source: int, target: int, kind: str, count: int, action: Action) -> None:
        """Let `action` happen at `target` when so many bytes, and all sent before, have arrived."""
        if self.ends[source].process.killed:
            return
        if kind == ARRAYS and target not in self._with_arrays[source]:
            self._with_arrays[source].add(target)
            self._with_arrays[target].add(source)
            if target in self._gone:  # Nobody answers.
                self._lose(target, source, ARRAYS, self._gone[target][0])
            if self._mutes & {(source, target), (target, source)}:
                self._lose_in_time(source, target)
                self._lose_in_time(target, source)
        if (source, target) in self._mutes or (source, target) in self._cuts:
            return
        hosts, left = self.topology.host_of, self._world.now
        if hosts[source] != hosts[target]:
            left = self._wires[hosts[source]].take(left, count)
        latency, line = self._latency_between(source, target), self._lines[source, target, kind]
        at = line.arrival(left, latency, self._stalls[source, target])

        def arrive() -> None:
            if (source, target) not in self._cuts:
                self._arrive(target, action)

        self._world.at(at, arrive, anywhere=True)

    def stall(self, source: int, target: int, seconds: float) -> None:
        """Let nothing arrive for a while in one direction."""
        self._stalls[source, target] = self._world.now + seconds

    def cut(self, one: int, other: int) -> None:
        """End what two ranks have open between them: both see it, and what is under way is lost."""
        for source, target in ((one, other), (other, one)):
            self._cuts.add((source, target))
            end, process = self.ends[target], self.ends[source].process
            if process.killed or self.ends[source].closed:
                continue
            if source in self._trees[target].neighbours:
                self._arrive(target, partial(end.lose_control, source))
            self._arrive(target, partial(end.lose_arrays, source))

    def mute(self, source: int, target: int) -> None:
        """Let nothing that a rank sends to another one arrive any more; the way back is free."""
        self._mutes.add((source, target))
        self._lose_in_time(source, target)
        self._lose_in_time(target, source)

    def _lose_in_time(self, rank: int, peer: int) -> None:
        """Let a peer see within the limit that it gets no answers of a rank."""

        def see() -> None:
            self._cuts.add((rank, peer))
            end = self.ends[peer]
            if rank in self._trees[peer].neighbours:
                self._arrive(peer, partial(end.lose_control, rank))
            if rank in self._with_arrays[peer]:
                self._arrive(peer, partial(end.lose_arrays, rank))

        seconds = SILENCE_SECONDS * (1 - 0.25 * self._world.lot.random())
        self._world.after(seconds, see)

    def _latency_between(self, one: int, other: int) -> float:
        near = self.topology.host_of[one] == self.topology.host_of[other]
        return (2e-5 if near else self._latency) * (0.5 + self._world.lot.random())

    def _arrive(self, target: int, action: Action) -> None:
        end = self.ends[target]
        if not end.closed:
            action()
            end.process.poke()

    def close(self, rank: int, silence: float = 0.0) -> None:
        """Let the peers of a rank see that its connections are closed, after a `silence`."""
        self._gone[rank] = silence, self._world.now + silence
        local = set(self.topology.peers(rank))
        for peer in sorted((local | self._trees[rank].neighbours) - {rank}):
            self._lose(rank, peer, MESSAGES, silence)
        for peer in sorted((local | self._with_arrays[rank]) - {rank}):
            self._lose(rank, peer, ARRAYS, silence)

    def check_caller(self, rank: int, peer: int) -> None:
        """Raise `PeerLostError` if a rank is gone that has not opened its connection for arrays.

        That could not tell `peer` of the end; another connection does.
        """
        if rank in self._gone and self._gone[rank][1] <= self._world.now:
            tells = self._with_arrays[peer].union(self.topology.peers(peer))
            if rank not in tells:
                raise connection_lost(rank)

    def _lose(self, rank: int, peer: int, kind: str, silence: float) -> None:
        if (rank, peer) in self._mutes:  # Which does not hear of the end.
            return
        at = self._world.now + silence + self._latency_between(rank, peer)
        at = max(at, self._lines[rank, peer, kind].last)
        if kind == ARRAYS:  # The tokens of a host go by the same connection as its signals.
            at = max(at, self._lines[rank, peer, TOKENS].last)
        end = self.ends[peer]
        action = end.lose_control if kind == MESSAGES else end.lose_arrays
        self._world.at(at, lambda: self._arrive(peer, lambda: action(rank)))


class SimulatedTransport(InProcessTransport):
    """One rank's end of a `Network`: what ranks change at others arrives after a latency."""

    def __init__(self, world: World, network: Network, rank: int) -> None:
        super().__init__(network.within, rank)
        self.process: Process = world.process(f"rank {rank}")
        self._world = world
        self._network = network
        self._count = 1  # Bytes of what is sent next.
        self._news = False  # A message has come since a wait for data has looked for any.

    @property
    def closed(self) -> bool:
        """Whether it is closed."""
        return self._closed

    def _carry(self, rank: int, kind: str, change: Action) -> None:
        end, count, self._count = self._network.ends[rank], self._count, 1

        def arrive() -> None:
            change()
            end._news |= kind == MESSAGES

        self._network.carry(self.rank, rank, kind, count, arrive)

    # -- control plane

    def send(self, rank: int, body: bytes) -> None:
        if not self.process.killed:
            text = f"sends rank {rank} {len(body)} bytes, {zlib.crc32(body):08x}"
            self._world.tell(f"rank {self.rank}", text)
            self._count = len(body)
            super().send(rank, body)

    def receive(self, timeout: float | None) -> list[Incoming]:
        box = self._box
        if self.process.killed and timeout == 0:
            return []
        if timeout != 0:
            self.process.sleep_until(lambda: box.woken or bool(box.control), timeout)
            box.woken = False
        messages = list(box.control)
        box.control.clear()
        return messages

    def wake(self, within: float = 0.0) -> None:
        if within:
            self._world.after(within, self.wake, anywhere=True)
        else:
            self._box.woken = True
            self.process.poke()

    def lose_control(self, rank: int) -> None:
        """See that the connection for messages was closed."""
        self._box.control.append(Incoming(rank, None))
        self._news = True

    # -- arrays

    def isend(self, rank: int, array: Array) -> Pending:
        if not 0 < array.nbytes <= self._network.eager_bytes:
            return super().isend(rank, array)
        offer = Offer(rank, array.copy())
        offer.finished = True
        self._offer(offer)
        return offer

    def _offer(self, offer: Offer) -> None:
        self._count = offer.array.nbytes
        super()._offer(offer)

    def lose_arrays(self, rank: int) -> None:
        """See that the connection for arrays and tokens was closed."""
        self._box.lost.add(rank)

    def _sleep_until(self, ready: Callable[[], bool], *ranks: int) -> None:
        """Sleep until `ready`; `ranks` have to live for it."""
        gone = self._box.lost

        def over() -> bool:
            return ready() or self._news or any(rank in gone for rank in ranks)

        while True:
            lost = [rank for rank in ranks if rank in gone]
            if ready():
                return
            if lost:
                raise connection_lost(lost[0])
            if not self.process.sleep_until(over, CHECK_SECONDS) or self._news:
                self._news = False
                self._negotiate()
                for rank in ranks:
                    self._network.check_caller(rank, self.rank)

    # -- closing

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if not self.process.killed:
                self._network.close(self.rank)
            self.process.end()
