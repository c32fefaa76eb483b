"""Connect the members of a process set by a device library, or find out that they cannot be.

    members tell each other, through the host:   device, unique id of the first member, error
    a helper thread of each member:              library.connect
    members tell each other:                     error

So all members are connected, or none is. The engine negotiates while it waits for the helper.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgpack

from hvdlite.common.collectives.base import Members
from hvdlite.common.devices.interface import Communicator, Context, DeviceLibrary

Gather = Callable[[bytes], list[bytes]]  # Through the host, in the order of the members.
WAIT_SECONDS = 0.01  # Between two looks of the engine at messages while a library connects.


class Outcome(NamedTuple):
    """A communicator, or why there is none, in the same words on all members."""

    communicator: Communicator | None
    reason: str = ""


class _Card(NamedTuple):
    """What a member tells the others."""

    identity: str
    unique_id: bytes
    error: str


def connect(
    library: DeviceLibrary,
    context: Context,
    members: Members,
    gather: Gather,
    negotiate: Callable[[], None],
) -> Outcome:
    """Connect all members, which call this between the same two collectives.

    `negotiate` is called while the library connects; an error of it ends the wait.
    """
    cards = [_Card(*msgpack.unpackb(each)) for each in gather(_card(library, context, members))]
    reason = _obstacle(library, members, cards)
    if reason:
        return Outcome(None, reason)
    attempt = _Attempt(library, context, members, cards[0].unique_id)
    attempt.wait(negotiate)
    errors = [each.decode() for each in gather(attempt.error.encode())]
    failed = [index for index, error in enumerate(errors) if error]
    if failed:
        if attempt.communicator is not None:
            attempt.communicator.abort()
        rank = members.ranks[failed[0]]
        return Outcome(None, f"{library.name} cannot connect rank {rank}: {errors[failed[0]]}")
    return Outcome(attempt.communicator)


def _card(library: DeviceLibrary, context: Context, members: Members) -> bytes:
    unique_id, error = b"", ""
    if members.index == 0:
        try:
            unique_id = library.unique_id()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    encoded: bytes = msgpack.packb((context.identity, unique_id, error))
    return encoded


def _obstacle(library: DeviceLibrary, members: Members, cards: Sequence[_Card]) -> str:
    """Return why the members cannot be connected, or ""."""
    if cards[0].error:
        return f"{library.name} cannot begin at rank {members.ranks[0]}: {cards[0].error}"
    owners: dict[str, int] = {}
    for rank, card in zip(members.ranks, cards, strict=True):
        other = owners.setdefault(card.identity, rank)
        if other != rank and not library.shares_devices:
            return (
                f"ranks {other} and {rank} use the same device ({card.identity}), which "
                f"{library.name} does not: give each rank its own, as by "
                "torch.cuda.set_device(hvd.local_rank()) or hvdlite-run --gpus-per-rank"
            )
    return ""


class _Attempt:
    """A call of `DeviceLibrary.connect` in a thread of its own."""

    def __init__(
        self, library: DeviceLibrary, context: Context, members: Members, unique_id: bytes
    ) -> None:
        self.communicator: Communicator | None = None
        self.error = ""
        self._arguments = library, context, members, unique_id
        self._lock = threading.Lock()  # Guards `communicator` and `_given_up`.
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="hvdlite-connect", daemon=True)

    def _run(self) -> None:
        library, context, members, unique_id = self._arguments
        try:
            made = library.connect(unique_id, members.index, members.size, context)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
            return
        with self._lock:
            self.communicator = made
            given_up = self._given_up
        if given_up:
            made.abort()

    def wait(self, negotiate: Callable[[], None]) -> None:
        """Sleep until the thread has ended, and negotiate meanwhile."""
        self._thread.start()
        try:
            while self._thread.is_alive():
                self._thread.join(WAIT_SECONDS)
                negotiate()
        except BaseException:
            with self._lock:
                self._given_up = True
            if self.communicator is not None:
                self.communicator.abort()
            raise
