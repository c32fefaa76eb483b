"""Measurements of a cluster for a `Model`, by the transport and the backends that it is about.

Each function runs on the engine thread of every rank at the same time (see `runtime.probe`), and
returns what this rank has measured. Between hosts the first ranks of each host take part, as many
as the smallest host has: the same as in an allreduce, so that they share the links as there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import numpy as np

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.collectives.base import Array, Backend, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import Choice
from hvdlite.common.collectives.between_hosts.costs import PIECE_BYTES
from hvdlite.common.collectives.chained_view import even_chain
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.multi_host.backends import FlatBackend
from hvdlite.common.collectives.multi_host.hierarchical import HierarchicalBackend
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.transport.base import Transport

SUM = Reduction(ReduceOp.SUM)
PINGS = 40
BATCHES = 3
SMALL_BYTES = 64
WORK_BYTES = 4 << 20  # more than a cache holds: what has come is not in it
BLOCKS, TENSORS = 32, 16  # for the time of a stretch


def taking_part(transport: Transport) -> int:
    """Return how many ranks of each host take part."""
    return min(len(host) for host in transport.topology.hosts)


def peer_at(transport: Transport, distance: int) -> int | None:
    """Return the rank with this one's place so many hosts on; None where it has no part."""
    hosts, rank = transport.topology.hosts, transport.rank
    place = transport.topology.local_rank(rank)
    if place >= taking_part(transport):
        return None
    return hosts[(transport.topology.host_of[rank] + distance) % len(hosts)][place]


def message_seconds(transport: Transport) -> float | None:
    """Return what a small message takes from the first rank of a host to that of the next one."""
    if transport.topology.local_rank(transport.rank):
        return None
    host, hosts = transport.topology.host_of[transport.rank], len(transport.topology.hosts)
    found = []
    for even in range(2):  # Pairs of hosts: 0-1, 2-3, ..., then 1-2, 3-4, ...
        place = host - even
        first = place % 2 == 0
        if place < 0 or (first and host + 1 == hosts):
            continue
        peer = peer_at(transport, 1 if first else -1)
        assert peer is not None
        found.append(_ping_pong(transport, peer, first))
    return median(found) if found else None


def local_message_seconds(transport: Transport) -> float | None:
    """Return what a small message takes from the first rank of a host to the second."""
    peers = transport.topology.peers(transport.rank)
    if len(peers) < 2 or transport.rank not in peers[:2]:
        return None
    first = transport.rank == peers[0]
    return _ping_pong(transport, peers[1] if first else peers[0], first)


def _ping_pong(transport: Transport, peer: int, first: bool) -> float:
    body, times = np.zeros(SMALL_BYTES, np.uint8), []
    for _ in range(PINGS):
        start = time.perf_counter()
        if first:
            transport.wait([transport.isend(peer, body)])
        transport.wait([transport.irecv(peer, body)])
        if not first:
            transport.wait([transport.isend(peer, body)])
        times.append((time.perf_counter() - start) / 2)
    return median(times[PINGS // 4 :])  # The first ones make the connection.


def shift_seconds(transport: Transport, nbytes: int) -> float:
    """Return how long all hosts need to send `nbytes` each to the next host.

    The shortest of three times counts: the first one makes connections.
    """
    to, by = peer_at(transport, 1), peer_at(transport, -1)
    if to is None or by is None:
        return 0.0
    length = max(1, nbytes // taking_part(transport))
    sizes = [min(PIECE_BYTES, length - at) for at in range(0, length, PIECE_BYTES)]
    source, target = (np.zeros(PIECE_BYTES, np.uint8) for _ in range(2))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        sends = [transport.isend(to, source[:size]) for size in sizes]
        for size in sizes:
            transport.wait([transport.irecv(by, target[:size])])
        transport.wait(sends)
        times.append(time.perf_counter() - start)
    return min(times)


def work_seconds() -> dict[str, float]:
    """Return the seconds to add and to copy a byte, and those of a stretch: without messages."""
    values, sums = np.ones((2, WORK_BYTES // 4), np.float32)
    arithmetic = Arithmetic(values.dtype, SUM)
    tensors = [np.zeros(BLOCKS, np.float32) for _ in range(TENSORS)]

    def stretches() -> None:
        for _ in range(2):  # as sources, and as targets
            for block in range(BLOCKS):
                chain = even_chain(tensors, BLOCKS, block)
                for view in chain.views(0, chain.size):
                    np.copyto(sums[: view.size], view)

    return {
        "reduced_byte": _median_seconds(lambda: arithmetic.merge(sums, values)) / WORK_BYTES,
        "copied_byte": _median_seconds(lambda: np.copyto(sums, values)) / WORK_BYTES,
        "stretch": _median_seconds(stretches) / (BLOCKS * TENSORS),
    }


def _median_seconds(run: Callable[[], object]) -> float:
    times = []
    for _ in range(15):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return median(times)


def local_byte_seconds(transport: Transport, backends: Sequence[Backend], nbytes: int) -> float:
    """Return the seconds for a byte of a tensor in one half of the work inside this host."""
    shm = next(each for each in backends if isinstance(each, ShmBackend))
    positions = transport.topology.peers(transport.rank)
    if len(positions) == 1:
        return 0.0
    topology = transport.topology.restrict(positions)
    local = Members(positions, positions.index(transport.rank), topology)
    array = np.zeros(nbytes // 4 // local.size * local.size, np.float32)
    part = np.empty(array.size // local.size, np.float32)
    counts = [[part.size] * local.size]
    arithmetic = Arithmetic(array.dtype, SUM)

    def both_halves() -> None:
        shm.reduce_parts(local, [array], [part], counts, arithmetic)
        shm.allgather(local, [part], [array], counts, _quiet)

    both_halves()
    start = time.perf_counter()
    both_halves()
    return (time.perf_counter() - start) / 2 / array.nbytes


def allreduce_seconds(
    transport: Transport,
    backends: Sequence[Backend],
    name: str,
    arrays: Sequence[Array],
    calls: int,
) -> list[float]:
    """Return the mean seconds of `calls` allreduces by one algorithm, in each of `BATCHES`.

    Ranks do not wait for each other between calls, but none can end one that another has not begun.
    """
    topology = transport.topology
    members = Members(tuple(range(topology.size)), transport.rank, topology)
    if len(topology.hosts) == topology.size:
        backend: Backend = FlatBackend(transport, Choice(name))
    else:
        shm = next(each for each in backends if isinstance(each, ShmBackend))
        backend = HierarchicalBackend(transport, shm, choice=Choice(name))
    times = []
    for number in (1, *[calls] * BATCHES):  # The first one makes connections, and is not counted.
        start = time.perf_counter()
        for _ in range(number):
            backend.allreduce(members, arrays, arrays, SUM, _quiet)
        times.append((time.perf_counter() - start) / number)
    return times[1:]


def _quiet(phase: str) -> AbstractContextManager[object]:
    return nullcontext()
