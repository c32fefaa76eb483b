"""The start of a job over any exchange: compare versions, find the hosts, meet inside each host."""

from __future__ import annotations

import logging
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.base.topology import Topology
from hvdlite.common.meeting.exchange import Exchange, Interrupt
from hvdlite.common.meeting.start_wait import spell_ranks
from hvdlite.common.requests.messages import PROTOCOL_VERSION, installed_version
from hvdlite.common.transport.local import LocalMesh, create_memory
from hvdlite.common.transport.rendezvous import TOKEN_BYTES, MeetingFolder, Peer, listen, meet

HELLO = struct.Struct("<8sI52s")  # MAGIC, protocol version, version of hvdlite.
MAGIC = b"hvdlite\0"

log = logging.getLogger("hvdlite")


def exchange_versions(exchange: Exchange, more: bytes = b"") -> list[bytes]:
    """Raise `HorovodVersionMismatchError` on all ranks when two protocols take part.

    Rank 0 warns where there are several versions with the same protocol. Returns what each rank
    says beside its version: its `more`.
    """
    local_version = installed_version()
    hello = HELLO.pack(MAGIC, PROTOCOL_VERSION, local_version.encode()[:52])
    said = exchange.allgather(hello + more)
    ranks_of: dict[str, list[int]] = {}
    for rank, other in enumerate(said):
        if len(other) < HELLO.size or not other.startswith(MAGIC):
            raise ProtocolError(f"rank {rank} does not run hvdlite: it says {other[:8]!r}", rank)
        _, protocol, other_version = HELLO.unpack(other[: HELLO.size])
        name = other_version.rstrip(b"\0").decode(errors="replace")
        ranks_of.setdefault(name, []).append(rank)
        if protocol != PROTOCOL_VERSION:
            raise HorovodVersionMismatchError(
                "hvdlite",
                f"{name} (protocol {protocol})",
                f"{local_version} (protocol {PROTOCOL_VERSION})",
            )
    if len(ranks_of) > 1 and exchange.rank == 0:
        log.warning(
            "the ranks of this job run several versions of hvdlite, which understand each other: "
            "%s. Install the same version for all ranks",
            "; ".join(f"{name} on {spell_ranks(ranks)}" for name, ranks in ranks_of.items()),
        )
    return [other[HELLO.size :] for other in said]


def find_hosts(exchange: Exchange, host: str, deadline: float) -> tuple[Topology, LocalMesh]:
    """Return which ranks share a host, and the connections of this rank inside its host.

    Raises `HorovodInternalError` on all ranks when one does not connect inside its host by
    `deadline` (monotonic seconds). See `Gathering` for `host`.
    """
    names = [name.decode() for name in exchange.allgather(host.encode())]
    with Gathering(exchange.rank, names) as gathering:
        gathering.listen(exchange.allgather(gathering.invite()))
        topology = gathering.split(exchange.allgather(gathering.answer))
        raise_first(exchange, gathering.meet(deadline))
        return topology, gathering.take_mesh()


class Gathering:
    """The ranks of this rank's host on their way to each other, in four steps.

    What `invite` returns, and then `answer`, goes to all ranks; `meet` connects; and when all ranks
    are known to have done that, `take_mesh` returns the connections. Until then the gathering must
    be open. Ranks whose entry in `hosts` is the same, but that do not see each other's files, count
    as hosts of their own. They meet in `folder`, by default that of temporary files.
    """

    def __init__(self, rank: int, hosts: Sequence[str], folder: str | None = None) -> None:
        self._rank, self._folder = rank, folder
        self._hosts: dict[str, list[int]] = {}
        for other, name in enumerate(hosts):
            self._hosts.setdefault(name, []).append(other)
        self._ranks = self._hosts[hosts[rank]]
        self._peers: tuple[int, ...] = ()
        self._place: tuple[MeetingFolder, socket.socket] | None = None
        self._mesh: LocalMesh | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Gathering:
        return self

    def __exit__(self, *error: object) -> None:
        if self._mesh is not None:
            self._mesh.close()
        self._stack.close()

    def invite(self) -> bytes:
        """Return the place where the ranks of this host meet, if this rank is to make it."""
        if len(self._ranks) > 1 and self._rank == self._ranks[0]:
            with suppress(OSError):
                meeting = MeetingFolder.new(self._folder)
                self._stack.callback(meeting.close)
                return meeting.token + os.fsencode(meeting.directory)
        return b""

    def listen(self, invitations: Sequence[bytes]) -> None:
        """Listen at the place to which this rank is invited, if it can be seen."""
        body = invitations[self._ranks[0]]
        if body:
            meeting = MeetingFolder(os.fsdecode(body[TOKEN_BYTES:]), body[:TOKEN_BYTES])
            with suppress(OSError):
                self._place = meeting, self._stack.enter_context(listen(meeting, self._rank))

    @property
    def answer(self) -> bytes:
        """One byte: whether this rank listens, or is alone."""
        return b"1" if len(self._ranks) == 1 or self._place is not None else b"0"

    def split(self, answers: Sequence[bytes]) -> Topology:
        hosts: list[tuple[int, ...]] = []
        for ranks in self._hosts.values():  # Those of a host are apart unless all of them listen.
            seen = all(answers[rank] == b"1" for rank in ranks)
            hosts += [tuple(ranks)] if seen else [(rank,) for rank in ranks]
        topology = Topology(tuple(sorted(hosts)))
        together = topology.peers(self._rank)
        if len(together) < len(self._ranks) and self._rank == self._ranks[0]:
            log.warning(
                "the ranks %s of this host do not see each other's files in %s, so each counts "
                "as a host of its own: set TMPDIR to a directory that all of them see",
                ", ".join(map(str, self._ranks)), tempfile.gettempdir(),
            )  # fmt: skip
        self._peers = tuple(rank for rank in together if rank != self._rank)
        return topology

    def meet(
        self, deadline: float, interrupt: Interrupt | None = None
    ) -> HorovodInternalError | None:
        """Connect to the other ranks of the host; return why that failed, None: it has not.

        Raises as `interrupt` does in its waits.
        """
        try:
            memory = create_memory()
        except (HorovodInternalError, OSError) as error:
            return _told(error)
        links: dict[int, Peer] = {}
        try:
            if self._peers and self._place is not None:
                links = meet(*self._place, self._rank, self._peers, memory, deadline, interrupt)
        except BaseException as error:
            os.close(memory)
            if isinstance(error, (HorovodInternalError, OSError)):
                return _told(error)
            raise
        self._mesh = LocalMesh(self._rank, links, memory)
        return None

    def take_mesh(self) -> LocalMesh:
        """Return the connections, which belong to the caller afterwards."""
        mesh, self._mesh = self._mesh, None
        assert mesh is not None  # They have met.
        return mesh


def _told(error: Exception) -> HorovodInternalError:
    """Return an error as the other ranks are told it: they need not wait for this one."""
    return error if isinstance(error, HorovodInternalError) else HorovodInternalError(str(error))


def raise_first(
    exchange: Exchange, failure: HorovodInternalError | None, *, consequence: bool = False
) -> None:
    """Raise on all ranks if one has failed: its own `failure`, or that of the first one.

    A `consequence` of what happened to another rank counts less than a cause.
    """
    mark = b"" if failure is None else b"2" if consequence else b"1"
    texts = exchange.allgather(mark + str(failure or "").encode())
    worst = min((text[:1] for text in texts if text), default=b"")
    if failure is not None and mark == worst:
        raise failure
    for rank, text in enumerate(texts):
        if text and text.startswith(worst):
            raise HorovodInternalError(f"rank {rank}: {text[1:].decode(errors='replace')}", rank)
