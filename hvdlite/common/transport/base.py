"""The interface of a transport, for the engine and the collectives.

One `Transport` belongs to one rank of one job and is used by that rank's engine thread alone, but
for the methods that say otherwise. Ranks are global ranks of the job.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.base.topology import Topology

Array = NDArray[Any]
# The memory of a rank for short calls: see `short_call.py`, which divides it.
SHORT_CALL_BYTES = (8 << 10) + 2 * (16 * (4 << 10) + (1 << 20) + (2 << 10))
CHECK_SECONDS = 0.05  # How often a wait without progress calls `while_waiting`.


class Incoming(NamedTuple):
    """One control message; `body` None means that the connection to `rank` was closed."""

    rank: int
    body: bytes | None


class Pending(Protocol):
    """A send or a receive that was started."""

    @property
    def rank(self) -> int:
        """The rank on the other side."""

    def done(self) -> bool:
        """Return whether it is complete; makes progress, never waits."""


class Transport(Protocol):
    """The connections of one rank."""

    rank: int
    topology: Topology

    def call_while_waiting(self, negotiate: Callable[[], None]) -> None:
        """Let every wait of the data plane call `negotiate` now and then, from now on.

        An error that `negotiate` raises ends the wait. The engine calls this once, before its
        thread starts. See [Note: negotiation while a collective waits] in engine.py.
        """

    def while_waiting(self) -> None:
        """Call the function of `call_while_waiting`: for waits outside of the transport.

        Arrays between hosts move on, too: another host may wait for what this rank has to send.
        """

    # -- control plane: small messages that keep their borders and their order, per pair
    def send(self, rank: int, body: bytes) -> None:
        """Queue `body` for `rank` and return at once. A lost peer is reported by `receive`."""

    def receive(self, timeout: float | None) -> list[Incoming]:
        """Sleep until a message comes, `wake` is called or `timeout` seconds have passed.

        Returns all messages that are there, or none. Timeout 0 only polls, and leaves a `wake` for
        the next receive that sleeps; None sleeps without a limit.
        """

    def wake(self, within: float = 0.0) -> None:
        """End the current or the next `receive`, at the latest in `within` seconds. Any thread."""

    # -- data plane between any two ranks: arrays, in order, per pair
    def isend(self, rank: int, array: Array) -> Pending:
        """Start to send a contiguous array; it must not change until that is done."""

    def irecv(self, rank: int, array: Array) -> Pending:
        """Start to receive into a contiguous array of exactly the size that is sent."""

    def wait(self, pendings: Sequence[Pending]) -> None:
        """Sleep until all are done. Raises `PeerLostError` naming the lost rank."""

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        """Sleep until one of several is done. Raises `PeerLostError` naming a lost rank."""

    # -- data plane inside a host: memory that all local ranks see
    def shared(self, rank: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the first `nbytes` of the memory that the local rank `rank` owns, as bytes.

        Every rank of the host may read and write it. It grows on demand, only by its owner, who
        must have called this with at least `nbytes` before a peer does (see `signal`/`await_signal`
        for how a peer knows). Contents survive growing; older views stay valid but detached.
        """

    def short_call_memory(self, rank: int) -> NDArray[np.uint8]:
        """Return SHORT_CALL_BYTES that the local rank `rank` owns, zero at first. Any thread.

        Every rank of the host may read and write them. They are apart from `shared`, as other
        threads than the engine's use them.
        """

    def signal(self, ranks: Sequence[int]) -> None:
        """Send one token to each of these local ranks; never waits."""

    def await_signal(self, rank: int) -> None:
        """Sleep until the next token from the local rank `rank`, and remove it.

        All memory that `rank` wrote before `signal` is visible after this. Raises `PeerLostError`.
        """

    def gone(self, rank: int) -> bool:
        """Return whether the local rank `rank` has closed, and nothing is left to read."""

    def close(self) -> None:
        """Close all connections; each rank at their other ends receives an `Incoming` without body.

        Over TCP a rank is connected with those of its host and its neighbours in the control tree,
        and with others once it has sent them a message. The control plane tells the rest: each rank
        that hears of a loss passes it on, up and down the tree.
        """

    def after_fork_in_child(self) -> None:
        """Close this process's copies of the connections, unseen by the parent and the peers.

        A child that kept them would hide the death of its parent. The transport is of no use to
        the child afterwards.
        """


def do_nothing() -> None:
    """Do nothing: the default of `call_while_waiting`, in a transport that no engine uses."""


def connection_lost(rank: int) -> PeerLostError:
    """Return the error of a wait for `rank` after its connection was closed."""
    return PeerLostError(f"the connection to rank {rank} was lost: the process has ended", rank)
