"""The start of a job over any exchange: compare versions, find the hosts, meet inside each host."""

from __future__ import annotations

import logging
import os
import socket
import struct
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.base.topology import Topology
from hvdlite.common.base.version import installed_version
from hvdlite.common.meeting.exchange import Exchange, Interrupt
from hvdlite.common.plain.messages import PROTOCOL_VERSION
from hvdlite.common.transport.local import LocalMesh
from hvdlite.common.transport.rendezvous import TOKEN_BYTES, Meeting, Peer, listen, meet
from hvdlite.common.transport.shared_memory import create_memory

HELLO = struct.Struct("<8sI52s")  # MAGIC, protocol version, version of hvdlite.
MAGIC = b"hvdlite\0"

log = logging.getLogger("hvdlite")


def exchange_versions(exchange: Exchange) -> None:
    """Raise `HorovodVersionMismatchError` on all ranks when two protocols take part."""
    local_version = installed_version()
    hello = HELLO.pack(MAGIC, PROTOCOL_VERSION, local_version.encode()[:52])
    for rank, other in enumerate(exchange.allgather(hello)):
        if len(other) != HELLO.size or not other.startswith(MAGIC):
            raise ProtocolError(f"rank {rank} does not run hvdlite: it says {other[:8]!r}", rank)
        _, protocol, other_version = HELLO.unpack(other)
        if protocol != PROTOCOL_VERSION:
            name = other_version.rstrip(b"\0").decode(errors="replace")
            raise HorovodVersionMismatchError(
                "hvdlite",
                f"{name} (protocol {protocol})",
                f"{local_version} (protocol {PROTOCOL_VERSION})",
            )


def find_hosts(
    exchange: Exchange,
    host: str,
    deadline: float,
    *,
    interrupt: Interrupt | None = None,
    folder: str | None = None,
) -> tuple[Topology, LocalMesh]:
    """Return which ranks share a host, and the connections of this rank inside its host.

    Ranks that give the same `host`, but do not see each other's files, count as hosts of their own.
    The ranks of a host meet in `folder`, by default that of temporary files. Raises
    `HorovodInternalError` on all ranks when one does not connect inside its host by `deadline`
    (monotonic seconds), and as `interrupt`.
    """
    hosts: dict[bytes, list[int]] = {}
    for rank, name in enumerate(exchange.allgather(host.encode())):
        hosts.setdefault(name, []).append(rank)
    ranks = hosts[host.encode()]
    with ExitStack() as stack:
        meeting = _invite(exchange, ranks, folder, stack)
        listener = None if meeting is None else _listen(meeting, exchange.rank, stack)
        alone = len(ranks) == 1
        listens = exchange.allgather(b"1" if alone or listener is not None else b"0")
        topology = _split(hosts.values(), listens)
        together = topology.peers(exchange.rank)
        if len(together) < len(ranks) and exchange.rank == ranks[0]:
            log.warning(
                "the ranks %s of this host do not see each other's files in %s, so each counts "
                "as a host of its own: set TMPDIR to a directory that all of them see",
                ", ".join(map(str, ranks)), tempfile.gettempdir(),
            )  # fmt: skip
        peers = tuple(rank for rank in together if rank != exchange.rank)
        place = None if meeting is None or listener is None else (meeting, listener)
        return topology, _meet(exchange, place, peers, deadline, interrupt)


def _invite(
    exchange: Exchange, ranks: Sequence[int], folder: str | None, stack: ExitStack
) -> Meeting | None:
    """Return the place where `ranks` meet, which the first of them makes; None if it cannot."""
    body = b""
    if len(ranks) > 1 and exchange.rank == ranks[0]:
        with suppress(OSError):
            meeting = Meeting.new(folder)
            stack.callback(meeting.close)
            body = meeting.token + os.fsencode(meeting.directory)
    body = exchange.allgather(body)[ranks[0]]
    if not body:
        return None
    return Meeting(os.fsdecode(body[TOKEN_BYTES:]), body[:TOKEN_BYTES])


def _listen(meeting: Meeting, rank: int, stack: ExitStack) -> socket.socket | None:
    """Listen at the meeting; None where its directory is not visible."""
    try:
        return stack.enter_context(listen(meeting, rank))
    except OSError:
        return None


def _split(hosts: Iterable[Sequence[int]], listens: Sequence[bytes]) -> Topology:
    """Return the topology: the ranks of a host are apart unless all of them listen."""
    together: list[tuple[int, ...]] = []
    for ranks in hosts:
        seen = all(listens[rank] == b"1" for rank in ranks)
        together += [tuple(ranks)] if seen else [(rank,) for rank in ranks]
    return Topology(tuple(sorted(together)))


def _meet(
    exchange: Exchange,
    place: tuple[Meeting, socket.socket] | None,
    peers: tuple[int, ...],
    deadline: float,
    interrupt: Interrupt | None,
) -> LocalMesh:
    """Connect to `peers`, the other ranks of the host, which meet at `place`."""
    memory = create_memory()
    links: dict[int, Peer] = {}
    failure: HorovodInternalError | None = None
    try:
        if peers and place is not None:
            try:
                links = meet(*place, exchange.rank, peers, memory, deadline, interrupt)
            except HorovodInternalError as error:
                failure = error
        raise_first(exchange, failure)
        return LocalMesh(exchange.rank, links, memory)
    except BaseException:
        os.close(memory)
        for peer in links.values():
            peer.close()
        raise


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
