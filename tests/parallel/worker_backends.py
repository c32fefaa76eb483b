"""What each rank of `test_backends` runs: the matrix of the backends in short form.

Usage: worker_backends.py WAY HOSTS [OPTION], where HOSTS is what the topology must be, such as
"2+2". OPTION "apart" simulates ranks of one host that do not see each other's files; "small" cuts
what goes to MPI in pieces of 1000, as 2^31 bytes would be.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives import mpi as mpi_backend
from hvdlite.common.collectives.base import Members, Reduction
from hvdlite.common.transport import bootstrap, mpi
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.rendezvous import MeetingFolder
from tests.backends import DTYPES, Program
from tests.parallel.connecting import connect
from tests.parallel.rank_helpers import rank, size

# Only MPI is told what each type is; to all else it is bytes, which tests/common adds with threads.
FEW = ("bool", "bfloat16", "int32", "float32", "complex128")


def main(way: str, hosts: str, option: str = "") -> None:
    """Check every collective among all ranks, and among all but the first.

    With the connections that one process makes next, small float32 stands for everything.
    """
    if option == "apart" and rank:
        bootstrap.listen = hide
    if option == "small":
        mpi.PART_BYTES = mpi.PROMPT_PART_BYTES = mpi_backend.MOST_ELEMENTS = 1000
    for dtypes in (DTYPES if way == "mpi" and not option else FEW, ("float32",)):
        transport = connect()
        found = "+".join(str(len(host)) for host in transport.topology.hosts)
        assert found == hosts, f"{found} is not {hosts}"
        check(transport, way, dtypes)
        talk(transport)
        transport.close()
    leave_by_turns()
    # Written at once, so that the lines of two ranks do not mix.
    os.write(1, f"rank {rank} of {size} is content\n".encode())


def hide(meeting: MeetingFolder, rank: int) -> socket.socket:
    """Stands for `listen` where the leader's directory is not to be seen."""
    raise FileNotFoundError(meeting.path(rank))


def check(transport: Transport, way: str, dtypes: Sequence[str]) -> None:
    """Every collective, among all ranks and among some."""
    others = "auto" if way == "hierarchical" else way
    program = Program.of(transport, allreduce=way, data_plane=others)
    for dtype in dtypes:
        program.everything(dtype, [0, 1, program.members.size, 101])
    if "bfloat16" in dtypes:
        large = 200_003 if mpi.PART_BYTES > 1000 else 20_003
        program.everything("float32", [large // 2])
        program.allreduce("bfloat16", [large, 5], Reduction(ReduceOp.SUM))  # many pieces
    members = tuple(range(1, program.members.size))
    if len(members) > 1 and transport.rank in members:
        topology = transport.topology.restrict(members)
        group = Members(members, members.index(transport.rank), topology)
        Program(transport, group, program.backends).everything("float32", [1, 101])


def talk(transport: Transport) -> None:
    """Large messages from everybody to everybody at once keep their borders and their order."""
    lengths = (0, 300_000)
    bodies = [bytes([sender]) * length for sender in range(size) for length in lengths]
    for peer in range(size):
        for body in bodies[2 * transport.rank : 2 * transport.rank + 2]:
            transport.send(peer, body)
    got: dict[int, list[bytes | None]] = {peer: [] for peer in range(size)}
    while any(len(each) < 2 for each in got.values()):
        for message in transport.receive(10.0):
            got[message.rank].append(message.body)
    for peer, each in got.items():
        lengths_got = [body and len(body) for body in each]
        assert each[:2] == bodies[2 * peer : 2 * peer + 2], f"{peer} has sent {lengths_got}"


def leave_by_turns() -> None:
    """Each rank closes when all before it have; nobody sees the end of another connection."""
    transport = connect(everyone=True)
    ended: set[int] = set()
    while len(ended) < rank:
        for peer, body in transport.receive(10.0):
            assert body is None and peer < rank, (peer, body)
            ended.add(peer)
    transport.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
