"""The network of a world: every pair of ranks has connections with latencies of their own.

Nothing overtakes on one connection; messages, arrays and tokens have one each, so these overtake
each other, and so do the connections of different pairs. A process that ends closes its
connections, which its peers see after what it had sent before. A host that is lost says nothing:
its peers see that after `SILENCE_SECONDS`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.base.topology import Topology
from hvdlite.common.decisions.control_tree import Tree
from hvdlite.common.transport.base import (
    CHECK_SECONDS,
    SHORT_CALL_BYTES,
    Array,
    Incoming,
    Pending,
    connection_lost,
    do_nothing,
)
from tests.simulation.world import Action, Process, World

SILENCE_SECONDS = 1.0
CONTROL, ARRAYS, TOKENS = "control", "arrays", "tokens"


class Network:
    """The connections between the ranks of one job."""

    def __init__(
        self, world: World, topology: Topology, *, fan_out: int, latency: float, eager_bytes: int
    ) -> None:
        """Arrays up to `eager_bytes` are copied when they are sent, larger ones on arrival."""
        self.topology = topology
        self.eager_bytes = eager_bytes
        self._world = world
        self._latency = latency
        self._busy_until: dict[tuple[int, int, str], float] = defaultdict(float)
        self._stalls: dict[tuple[int, int], float] = defaultdict(float)  # Source, target -> end.
        self._cuts: set[tuple[int, int]] = set()
        self._with_arrays: dict[int, set[int]] = defaultdict(set)
        self._trees = [Tree(topology, rank, fan_out) for rank in range(topology.size)]
        self.ends = [SimulatedTransport(world, self, rank) for rank in range(topology.size)]

    def carry(self, source: int, target: int, kind: str, action: Action) -> None:
        """Let `action` happen at `target` after a latency, and after all that was sent before."""
        if self.ends[source].process.killed or (source, target) in self._cuts:
            return
        if kind == ARRAYS:
            self._with_arrays[source].add(target)
            self._with_arrays[target].add(source)
        key = source, target, kind
        at = max(self._busy_until[key], self._world.now + self._latency_between(source, target))
        at = self._busy_until[key] = max(at, self._stalls[source, target])

        def arrive() -> None:
            if (source, target) not in self._cuts:
                self._arrive(target, action)

        self._world.after(at - self._world.now, arrive)

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
        local = set(self.topology.peers(rank))
        for peer in sorted((local | self._trees[rank].neighbours) - {rank}):
            self._lose(rank, peer, CONTROL, silence)
        for peer in sorted((local | self._with_arrays[rank]) - {rank}):
            self._lose(rank, peer, ARRAYS, silence)

    def _lose(self, rank: int, peer: int, kind: str, silence: float) -> None:
        at = self._world.now + silence + self._latency_between(rank, peer)
        at = max(at, self._busy_until[rank, peer, kind])
        if kind == ARRAYS:  # The tokens of a host go by the same connection as its signals.
            at = max(at, self._busy_until[rank, peer, TOKENS])
        end = self.ends[peer]
        action = end.lose_control if kind == CONTROL else end.lose_arrays
        self._world.after(at - self._world.now, lambda: self._arrive(peer, lambda: action(rank)))


class _Send:
    def __init__(self, rank: int, array: Array, *, eager: bool) -> None:
        self.rank = rank
        self.array = array.copy() if eager else array
        self.finished = eager

    def done(self) -> bool:
        return self.finished


class _Receive:
    def __init__(self, end: SimulatedTransport, rank: int, array: Array) -> None:
        self.rank = rank
        self.array = array
        self.finished = array.size == 0
        self._end = end

    def done(self) -> bool:
        if not self.finished:
            self._end.match(self.rank)
        return self.finished


class SimulatedTransport:
    """One rank's end of a `Network`: the `Transport` of its engine."""

    def __init__(self, world: World, network: Network, rank: int) -> None:
        self.rank = rank
        self.topology = network.topology
        self.process: Process = world.process(f"rank {rank}")
        self.closed = False
        self._world = world
        self._network = network
        self._negotiate: Callable[[], None] = do_nothing
        self._woken = False
        self._news = False  # A message has come since a wait for data has looked for any.
        self._messages: deque[Incoming] = deque()
        self._tokens: dict[int, int] = defaultdict(int)
        self._offers: dict[int, deque[_Send]] = defaultdict(deque)
        self._posted: dict[int, deque[_Receive]] = defaultdict(deque)
        self._lost: set[int] = set()
        self._memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self._short: NDArray[np.uint8] | None = None

    # -- control plane

    def send(self, rank: int, body: bytes) -> None:
        if self.process.killed:
            return
        body = bytes(body)
        text = f"sends rank {rank} {len(body)} bytes, {zlib.crc32(body):08x}"
        self._world.tell(f"rank {self.rank}", text)
        message = Incoming(self.rank, body)
        end = self._network.ends[rank]
        self._network.carry(self.rank, rank, CONTROL, lambda: end.hear(message))

    def hear(self, message: Incoming) -> None:
        """Take a message, or the end of a connection, that arrives."""
        self._messages.append(message)
        self._news = True

    def receive(self, timeout: float | None) -> list[Incoming]:
        if self.process.killed and timeout == 0:
            return []
        if timeout != 0:
            self.process.sleep_until(lambda: self._woken or bool(self._messages), timeout)
            self._woken = False
        messages = list(self._messages)
        self._messages.clear()
        return messages

    def wake(self, within: float = 0.0) -> None:
        if within:
            self._world.after(within, self.wake)
        else:
            self._woken = True
            self.process.poke()

    def lose_control(self, rank: int) -> None:
        """See that the connection for messages was closed."""
        self.hear(Incoming(rank, None))

    # -- arrays

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        self._negotiate = negotiate

    def while_waiting(self) -> None:
        self._negotiate()

    def isend(self, rank: int, array: Array) -> Pending:
        send = _Send(rank, array, eager=array.nbytes <= self._network.eager_bytes)
        if array.size:
            offers = self._network.ends[rank]._offers[self.rank]
            self._network.carry(self.rank, rank, ARRAYS, lambda: offers.append(send))
        else:
            send.finished = True
        return send

    def irecv(self, rank: int, array: Array) -> Pending:
        receive = _Receive(self, rank, array)
        if not receive.finished:
            self._posted[rank].append(receive)
        return receive

    def match(self, rank: int) -> None:
        """Copy what has arrived from `rank` into the receives that were posted for it."""
        posted, offers = self._posted[rank], self._offers[rank]
        while posted and offers:
            receive, send = posted.popleft(), offers.popleft()
            if receive.array.nbytes != send.array.nbytes:
                raise ProtocolError(
                    f"rank {rank} sent {send.array.nbytes} bytes to rank {self.rank}, "
                    f"which expected {receive.array.nbytes}",
                    rank,
                )
            np.copyto(receive.array.view(np.uint8), send.array.view(np.uint8))
            receive.finished = True
            if not send.finished:
                self._network.carry(self.rank, rank, ARRAYS, lambda s=send: _finish(s))  # type: ignore[misc]

    def wait(self, pendings: Sequence[Pending]) -> None:
        for pending in pendings:
            self._sleep_until(pending.done, pending.rank)

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        ranks = [pending.rank for pending in pendings]
        self._sleep_until(lambda: any(pending.done() for pending in pendings), *ranks)

    def lose_arrays(self, rank: int) -> None:
        """See that the connection for arrays and tokens was closed."""
        self._lost.add(rank)

    # -- memory of a host

    def shared(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        owner = self._network.ends[rank]
        if owner._memory.size < nbytes:
            if rank != self.rank:
                raise ProtocolError(
                    f"rank {self.rank} asked for {nbytes} bytes of the memory of rank {rank}, "
                    f"which has {owner._memory.size}",
                    rank,
                )
            grown = np.zeros(nbytes, np.uint8)
            grown[: owner._memory.size] = owner._memory
            owner._memory = grown
        return owner._memory[:nbytes]

    def short_call_memory(self, rank: int) -> NDArray[np.uint8]:
        owner = self._network.ends[rank]
        if owner._short is None:
            owner._short = np.zeros(SHORT_CALL_BYTES, np.uint8)
        return owner._short

    def signal(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            end = self._network.ends[rank]
            self._network.carry(self.rank, rank, TOKENS, lambda e=end: e.take(self.rank))  # type: ignore[misc]

    def take(self, rank: int) -> None:
        """Take a token of a local rank."""
        self._tokens[rank] += 1

    def await_signal(self, rank: int) -> None:
        self._sleep_until(lambda: self._tokens[rank] > 0, rank)
        self._tokens[rank] -= 1

    def gone(self, rank: int) -> bool:
        return rank in self._lost or self.closed

    def _sleep_until(self, ready: Callable[[], bool], *ranks: int) -> None:
        """Sleep until `ready`; `ranks` have to live for it."""

        def over() -> bool:
            return ready() or self._news or any(rank in self._lost for rank in ranks)

        while True:
            lost = [rank for rank in ranks if rank in self._lost]
            if ready():
                return
            if lost:
                raise connection_lost(lost[0])
            if not self.process.sleep_until(over, CHECK_SECONDS) or self._news:
                self._news = False
                self._negotiate()

    # -- closing

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            if not self.process.killed:
                self._network.close(self.rank)
            self.process.end()

    def after_fork_in_child(self) -> None:
        """Nothing is open here that a child could keep."""


def _finish(send: _Send) -> None:
    send.finished = True
