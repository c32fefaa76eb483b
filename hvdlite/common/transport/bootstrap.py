"""The start of a job over MPI: duplicate the communicator, compare versions, find the hosts.

Blocking MPI calls are made here, and only here: `init` waits for all ranks anyway.
"""

from __future__ import annotations

import logging
import os
import struct
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import numpy as np

from hvdlite.common.base.errors import (
    HorovodInternalError,
    HorovodVersionMismatchError,
    ProtocolError,
)
from hvdlite.common.base.topology import Topology
from hvdlite.common.plain.messages import PROTOCOL_VERSION
from hvdlite.common.transport.local import LocalMesh, create_memory
from hvdlite.common.transport.rendezvous import Meeting, Peer, listen, meet

if TYPE_CHECKING:
    from mpi4py import MPI

HELLO = struct.Struct("<8sI52s")  # MAGIC, protocol version, version of hvdlite.
MAGIC = b"hvdlite\0"
INVITATION = struct.Struct("<H16s512s")  # Length of the path (0: no meeting), token, path.
POLL_SECONDS = 0.001

log = logging.getLogger("hvdlite")


# Duplications that some ranks did not join in time: (communicator, its copy, the request). Such a
# rank may still come, and joins the oldest of them, so the next `init` goes on with that one.
_unfinished: list[tuple[MPI.Intracomm, MPI.Intracomm, MPI.Request]] = []


def duplicate(
    comm: MPI.Intracomm, deadline: float, give_up: Callable[[], HorovodInternalError]
) -> MPI.Intracomm:
    """Return a communicator of our own, whose errors are exceptions.

    Raises what `give_up` returns when some ranks have not come by `deadline` (monotonic seconds).
    """
    from mpi4py import MPI

    waiting = next((duplication for duplication in _unfinished if duplication[0] == comm), None)
    if waiting is None:
        waiting = (comm, *comm.Idup())
        _unfinished.append(waiting)
    _, copy, request = waiting
    while not request.Test():
        if time.monotonic() > deadline:
            raise give_up()
        time.sleep(POLL_SECONDS)
    _unfinished.remove(waiting)
    copy.Set_errhandler(MPI.ERRORS_RETURN)
    return copy


def exchange_versions(comm: MPI.Intracomm) -> None:
    """Raise `HorovodVersionMismatchError` on all ranks when two protocols take part."""
    try:
        local_version = version("hvdlite")
    except PackageNotFoundError:  # Run from a checkout that is not installed.
        local_version = "unknown"
    hello = HELLO.pack(MAGIC, PROTOCOL_VERSION, local_version.encode()[:52])
    for rank, other in enumerate(_allgather(comm, hello)):
        magic, protocol, other_version = HELLO.unpack(other)
        if magic != MAGIC:
            raise ProtocolError(f"rank {rank} does not run hvdlite: it says {magic!r}", rank)
        if protocol != PROTOCOL_VERSION:
            name = other_version.rstrip(b"\0").decode(errors="replace")
            raise HorovodVersionMismatchError(
                "hvdlite",
                f"{name} (protocol {protocol})",
                f"{local_version} (protocol {PROTOCOL_VERSION})",
            )


def find_hosts(comm: MPI.Intracomm, deadline: float) -> tuple[Topology, LocalMesh]:
    """Return which ranks share a host, and the connections of this rank inside its host.

    Ranks that MPI puts on one host, but that do not see each other's files, count as hosts of their
    own. Raises `HorovodInternalError` when a local rank fails to connect.
    """
    from mpi4py import MPI

    local: Any = comm.Split_type(MPI.COMM_TYPE_SHARED, comm.rank)
    try:
        members = np.empty(local.size, np.int64)
        local.Allgather(np.array([comm.rank], np.int64), members)
        ranks = tuple(int(rank) for rank in members)
        mesh = _meet(local, comm.rank, ranks, deadline)
    finally:
        local.Free()
    together = len(ranks) if mesh else 1
    if mesh is None:
        mesh = _mesh(comm.rank, {})
    leaders = np.empty(comm.size, np.int64)
    comm.Allgather(np.array([ranks[0] if together > 1 else comm.rank], np.int64), leaders)
    hosts: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        hosts.setdefault(int(leader), []).append(rank)
    return Topology(tuple(tuple(host) for host in hosts.values())), mesh


def _meet(
    local: MPI.Intracomm, rank: int, ranks: tuple[int, ...], deadline: float
) -> LocalMesh | None:
    """Return the mesh of the ranks of one host; None when they cannot meet."""
    meeting, leads = None, local.rank == 0
    try:
        if leads:
            meeting = _new_meeting()
        meeting = _invite(local, meeting)
        listener = None
        if meeting is not None:
            try:
                listener = listen(meeting, rank)
            except OSError:
                listener = None
        if not _all(local, listener is not None):
            if listener is not None:
                listener.close()
            if leads:
                log.warning(
                    "the ranks %s of this host do not see each other's files in %s, so each counts "
                    "as a host of its own: set TMPDIR to a directory that all of them see",
                    ", ".join(map(str, ranks)), tempfile.gettempdir(),
                )  # fmt: skip
            return None
        assert meeting is not None and listener is not None
        peers = tuple(peer for peer in ranks if peer != rank)
        memory = create_memory()
        failure: HorovodInternalError | None = None
        links: dict[int, Peer] = {}
        try:
            links = meet(meeting, listener, rank, peers, memory, deadline)
        except HorovodInternalError as error:
            failure = error
        if not _all(local, failure is None):
            os.close(memory)
            for peer in links.values():
                peer.close()
            raise failure or HorovodInternalError("another rank of this host could not connect")
        return LocalMesh(rank, links, memory)
    finally:
        if leads and meeting is not None:
            meeting.close()


def _mesh(rank: int, links: dict[int, Peer]) -> LocalMesh:
    return LocalMesh(rank, links, create_memory())


def _new_meeting() -> Meeting | None:
    try:
        return Meeting.new()
    except OSError:
        return None


def _invite(local: MPI.Intracomm, meeting: Meeting | None) -> Meeting | None:
    """Broadcast the leader's meeting to all local ranks; None if it could not make one."""
    path = os.fsencode(meeting.directory) if meeting else b""
    token = meeting.token if meeting else b""
    buffer = np.frombuffer(INVITATION.pack(len(path), token, path), np.uint8).copy()
    local.Bcast(buffer, 0)
    length, token, path = INVITATION.unpack(buffer.tobytes())
    return Meeting(os.fsdecode(path[:length]), token) if length else None


def _all(comm: MPI.Intracomm, mine: bool) -> bool:
    """Return whether `mine` is true on all ranks; also a barrier."""
    result = np.empty(comm.size, np.uint8)
    comm.Allgather(np.array([mine], np.uint8), result)
    return bool(result.all())


def _allgather(comm: MPI.Intracomm, body: bytes) -> list[bytes]:
    """Return the `body` of every rank; all have the same length."""
    buffer: Any = np.empty((comm.size, len(body)), np.uint8)
    comm.Allgather(np.frombuffer(body, np.uint8), buffer)
    return [row.tobytes() for row in buffer]
