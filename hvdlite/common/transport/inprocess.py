"""A transport whose ranks are threads of one process: for a world of one rank, and for tests."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import ProtocolError
from hvdlite.common.base.topology import Topology
from hvdlite.common.transport.base import (
    CHECK_SECONDS,
    SHORT_CALL_BYTES,
    Array,
    Incoming,
    Pending,
    connection_lost,
    do_nothing,
)

# The kinds of what goes from rank to rank.
MESSAGES, ARRAYS, TOKENS = "messages", "arrays", "tokens"


def solo() -> InProcessTransport:
    """Return the transport of a job of one rank; needs no MPI."""
    return InProcessWorld(Topology.single_host(1)).transport(0)


class InProcessWorld:
    """All ranks of one job; a topology of several hosts is simulated."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.mailboxes = {rank: _Mailbox(topology.size) for rank in range(topology.size)}
        self._transports = {rank: InProcessTransport(self, rank) for rank in self.mailboxes}

    def transport(self, rank: int) -> InProcessTransport:
        """Return the transport of `rank`, always the same one."""
        return self._transports[rank]


class _Mailbox:
    """Messages, tokens and arrays for one rank. `changed` guards all fields."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.version = 0  # Counts changes, so that a sleeper misses none.
        self.woken = False
        self.control: deque[Incoming] = deque()
        self.tokens = [0] * size  # By sender, as the offers are.
        self.offers: list[deque[Offer]] = [deque() for _ in range(size)]
        self.lost: set[int] = set()
        self.memory: NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.short_call_memory: NDArray[np.uint8] = np.zeros(0, np.uint8)  # Until it is used.

    def update(self, change: Callable[[], object]) -> None:
        with self.changed:
            change()
            self.version += 1
            self.changed.notify_all()


class Offer:
    """An array that is offered to `rank`; `finished` once the receiver has copied it."""

    def __init__(self, rank: int, array: Array) -> None:
        self.rank = rank
        self.array = array
        self.finished = array.size == 0

    def done(self) -> bool:
        return self.finished


class _Receive:
    """An array that waits for what `rank` sends."""

    def __init__(self, transport: InProcessTransport, rank: int, array: Array) -> None:
        self.rank = rank
        self.array = array
        self.finished = array.size == 0
        self._transport = transport

    def done(self) -> bool:
        if not self.finished:
            self._transport.match(self.rank)
        return self.finished


class InProcessTransport:
    """One rank of an `InProcessWorld`. Sends are rendezvous: done when the receiver has copied."""

    def __init__(self, world: InProcessWorld, rank: int) -> None:
        self.rank = rank
        self.topology = world.topology
        self._negotiate: Callable[[], None] = do_nothing
        self._boxes = world.mailboxes
        self._box = world.mailboxes[rank]
        self._posted: dict[int, deque[_Receive]] = defaultdict(deque)
        self._closed = False

    def _carry(self, rank: int, kind: str, change: Callable[[], object]) -> None:
        """Change something at another rank: what a connection would carry, of one of three kinds.

        Nothing overtakes on the way to a rank, here; of one kind, it must not anywhere.
        """
        self._boxes[rank].update(change)

    # -- control plane

    def send(self, rank: int, body: bytes) -> None:
        message = Incoming(self.rank, bytes(body))
        self._carry(rank, MESSAGES, partial(self._boxes[rank].control.append, message))

    def receive(self, timeout: float | None) -> list[Incoming]:
        box = self._box
        with box.changed:
            if timeout != 0:
                box.changed.wait_for(lambda: box.woken or box.control, timeout)
                box.woken = False
            messages = list(box.control)
            box.control.clear()
        return messages

    def wake(self, within: float = 0.0) -> None:
        self._box.update(partial(setattr, self._box, "woken", True))

    # -- waits

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        self._negotiate = negotiate

    def while_waiting(self) -> None:
        self._negotiate()

    # -- arrays

    def isend(self, rank: int, array: Array) -> Pending:
        offer = Offer(rank, array)
        if not offer.finished:
            self._offer(offer)
        return offer

    def _offer(self, offer: Offer) -> None:
        offers = self._boxes[offer.rank].offers[self.rank]
        self._carry(offer.rank, ARRAYS, partial(offers.append, offer))

    def irecv(self, rank: int, array: Array) -> Pending:
        receive = _Receive(self, rank, array)
        if not receive.finished:
            self._posted[rank].append(receive)
        return receive

    def match(self, rank: int) -> None:
        """Copy what `rank` has offered into the receives that were posted for it, in order."""
        posted = self._posted[rank]
        offers = self._box.offers[rank]
        while posted and offers:
            receive, offer = posted.popleft(), offers.popleft()
            if receive.array.nbytes != offer.array.nbytes:
                raise ProtocolError(
                    f"rank {rank} sent {offer.array.nbytes} bytes to rank {self.rank}, "
                    f"which expected {receive.array.nbytes}",
                    rank,
                )
            np.copyto(receive.array.view(np.uint8), offer.array.view(np.uint8))
            receive.finished = True
            if not offer.finished:
                self._carry(rank, ARRAYS, partial(setattr, offer, "finished", True))

    def wait(self, pendings: Sequence[Pending]) -> None:
        for pending in pendings:
            self._sleep_until(pending.done, pending.rank)

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        ranks = [pending.rank for pending in pendings]
        self._sleep_until(lambda: any(pending.done() for pending in pendings), *ranks)

    # -- shared memory

    def shared(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        box = self._boxes[rank]
        with box.changed:
            if box.memory.size < nbytes:
                if rank != self.rank:
                    raise ProtocolError(
                        f"rank {self.rank} asked for {nbytes} bytes of the memory of rank {rank}, "
                        f"which has {box.memory.size}",
                        rank,
                    )
                grown = np.zeros(nbytes, np.uint8)
                grown[: box.memory.size] = box.memory
                box.memory = grown
            return box.memory[:nbytes]

    def short_call_memory(self, rank: int) -> NDArray[np.uint8]:
        box = self._boxes[rank]
        with box.changed:
            if not box.short_call_memory.size:
                box.short_call_memory = np.zeros(SHORT_CALL_BYTES, np.uint8)
            return box.short_call_memory

    def signal(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._carry(rank, TOKENS, partial(self._add_token, self._boxes[rank]))

    def _add_token(self, box: _Mailbox) -> None:
        box.tokens[self.rank] += 1

    def await_signal(self, rank: int) -> None:
        tokens = self._box.tokens
        self._sleep_until(lambda: tokens[rank] > 0, rank)
        with self._box.changed:
            tokens[rank] -= 1

    def gone(self, rank: int) -> bool:
        return rank in self._box.lost or self._closed

    def _sleep_until(self, ready: Callable[[], bool], *ranks: int) -> None:
        """Sleep until `ready`, which is called without the lock; `ranks` have to live for it."""
        box = self._box
        while True:
            seen = box.version
            lost = [rank for rank in ranks if rank in box.lost or self._closed]
            if ready():
                return
            if lost:
                raise connection_lost(lost[0])
            with box.changed:
                changed = box.changed.wait_for(lambda: box.version != seen, CHECK_SECONDS)  # noqa: B023
            if not changed or box.control:
                self._negotiate()

    # -- closing

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for rank, box in self._boxes.items():
            if rank != self.rank:
                box.update(partial(self._announce_close, box))

    def _announce_close(self, box: _Mailbox) -> None:
        box.lost.add(self.rank)
        box.control.append(Incoming(self.rank, None))

    def after_fork_in_child(self) -> None:
        """See `Transport.after_fork_in_child`: threads do not survive a fork, nothing is open."""
