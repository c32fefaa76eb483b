"""Connect the members of a process set by a device library, or find out that they cannot be.

    members tell each other, through the host:   device, unique id of the first member, error
    a helper thread of each member:              library.connect
    members tell each other:                     error

So all members are connected, or none is. The engine negotiates while it waits for the helper.
`CommunicatorTable` remembers the outcomes.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgpack

from hvdlite.common.collectives.base import Members
from hvdlite.common.devices.interface import Communicator, Context, DeviceLibrary
from hvdlite.common.transport.base import do_nothing

# The two layers of members on several hosts: those of one host, and one of each host.


@dataclass
class Layers:
    """The layers as one member sees them."""

    local: Members  # Those of this host.
    cross: Members  # Those with the same place in their hosts.
    communicator: Communicator | None = None  # Of `local`.


def layers_of(members: Members) -> Layers | None:
    """Return the layers; None where all hosts do not have as many members, two or more."""
    topology = members.topology
    if len(topology.hosts) == 1 or not topology.homogeneous or len(topology.hosts[0]) == 1:
        return None
    return Layers(
        _some_of(members, topology.peers(members.index)),
        _some_of(members, topology.cross_peers(members.index)),
    )


def _some_of(members: Members, positions: Sequence[int]) -> Members:
    chosen = tuple(sorted(positions))
    return Members(
        tuple(members.ranks[position] for position in chosen),
        chosen.index(members.index),
        members.topology.restrict(chosen),
    )


log = logging.getLogger("hvdlite")
Gather = Callable[[bytes], list[bytes]]  # Through the host, in the order of the members.
WAIT_SECONDS = 0.01  # Between two looks of the engine at messages while a library connects.


class Outcome(NamedTuple):
    """A communicator, or why there is none, in the same words on all members."""

    communicator: Communicator | None
    reason: str = ""


class _Card(NamedTuple):
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
    unique_id, error = b"", ""
    if members.index == 0:
        try:
            unique_id = library.unique_id()
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
    card = msgpack.packb((context.identity, unique_id, error))
    cards = [_Card(*msgpack.unpackb(each)) for each in gather(card)]
    reason = _obstacle(library, members, cards)
    if reason:
        discard = getattr(library, "discard", None)
        if members.index == 0 and discard is not None:
            discard(cards[0].unique_id)
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
        except BaseException as error:  # Whatever it is, the other members must hear of it.
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


class CommunicatorTable:
    """The communicators of one rank, by library and members. Engine thread."""

    def __init__(
        self,
        gather: Callable[[Members, bytes], list[bytes]],
        negotiate: Callable[[], None],
    ) -> None:
        self._gather = gather
        self._negotiate = negotiate
        # None where the members cannot be connected, and everything is staged.
        self._known: dict[tuple[str, tuple[int, ...]], Communicator | None] = {}
        # Which members use each of them: its own, and larger ones whose layers have it. All of its
        # members are among these, so that they see the last one go at the same time.
        self._users: dict[tuple[str, tuple[int, ...]], set[tuple[int, ...]]] = {}
        # None where the members on some host cannot, or hosts have different numbers of them.
        self._layers: dict[tuple[str, tuple[int, ...]], Layers | None] = {}

    def find(
        self,
        library: DeviceLibrary,
        context: Context,
        members: Members,
        user: tuple[int, ...] = (),
    ) -> Communicator | None:
        """Return the communicator of members, which all make this call; None: stage.

        It is for the members `user`, by default for these themselves.
        """
        key = library.name, members.ranks
        self._users.setdefault(key, set()).add(user or members.ranks)
        if key not in self._known:
            outcome = connect(
                library,
                context,
                members,
                lambda text: self._gather(members, text),
                self._negotiate,
            )
            self._known[key] = outcome.communicator
            if outcome.communicator is None and members.index == 0:
                log.warning(
                    "tensors of ranks %s go through host memory: %s",
                    list(members.ranks), outcome.reason,
                )  # fmt: skip
        return self._known[key]

    def layers(self, library: DeviceLibrary, context: Context, members: Members) -> Layers | None:
        """Return the layers of members, which all make this call; None: do without."""
        key = library.name, members.ranks
        if key not in self._layers:
            layers = layers_of(members)
            if layers is not None:
                layers.communicator = self.find(library, context, layers.local, members.ranks)
                outcomes = self._gather(members, b"" if layers.communicator is None else b"1")
                if not all(outcomes):
                    layers = None
            self._layers[key] = layers
        return self._layers[key]

    def pop(self, ranks: tuple[int, ...]) -> list[tuple[str, Communicator]]:
        """Forget the members `ranks`; return what nobody uses any more, with the libraries' names.

        All of them make this call.
        """
        for key in [key for key in self._layers if key[1] == ranks]:
            del self._layers[key]
        popped = []
        for key, users in list(self._users.items()):
            users.discard(ranks)
            if not users:
                del self._users[key]
                popped.append((key[0], self._known.pop(key, None)))
        return [(library, known) for library, known in popped if known is not None]

    def abort(self) -> None:
        """End what is queued on all communicators."""
        for communicator in self._existing():
            quietly(communicator.abort)
        self._known.clear()

    def close(self) -> None:
        """Free all communicators that were not aborted; their work is done."""
        for communicator in self._existing():
            quietly(communicator.close)
        self._known.clear()
        self._users.clear()
        self._layers.clear()
        self._negotiate = do_nothing  # The engine refers to this table.

    def _existing(self) -> list[Communicator]:
        return [each for each in self._known.values() if each is not None]


def quietly(step: Callable[[], None]) -> None:
    """Do a step of an ending. What it raises adds nothing."""
    try:
        step()
    except Exception as error:
        log.debug("at the end of a communicator: %s", error)
