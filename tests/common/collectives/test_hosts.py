"""Collectives over several hosts: numpy's results, the fewest bytes between hosts, lost members."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import PATHS, paths_of
from hvdlite.common.collectives.between_hosts.costs import (
    Model,
    cheapest_of,
)
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Pending, Transport
from tests.backends import (
    DTYPES,
    FEW_DTYPES,
    Program,
    noise,
    quiet,
    run_on_transports,
    uneven,
    values,
)
from tests.ranks import run_ranks
from tests.worlds import IN_PROCESS, TCP

pytestmark = pytest.mark.timeout(120)

SUM = Reduction(ReduceOp.SUM)
COLLECTIVES = ("reducescatter", "allgather", "broadcast", "alltoall")
# Ranks that are not in the order of hosts, and hosts of several sizes.
LAYOUTS = {
    "2+2": ((0, 1), (2, 3)),
    "1+3": ((0,), (1, 2, 3)),
    "3+1+2": ((0, 2, 5), (1,), (3, 4)),
    "2+3+2": ((0, 3), (1, 4, 6), (2, 5)),
    "2x5": ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),
    "flat": ((0,), (1,), (2,), (3,), (4,)),
}
EVERYWHERE = ("1+3", "2+3+2", "flat")  # The others are tried by the soak, and at random below.
# What is chosen where only one figure counts: few rounds, or few bytes far away and in copies.
NOTHING = Model(*[0.0] * len(Model.names()))
FEW_ROUNDS = replace(NOTHING, message=1.0)
FEW_BYTES = replace(NOTHING, byte=1.0, far_byte=2.0, copied_byte=1.0, local_byte=1.0)
MODELS = {"few rounds": FEW_ROUNDS, "few bytes": FEW_BYTES, "default": Model()}


def program_of(
    transport: Transport, model: Model, piece_bytes: int, members: Members | None = None,
    **settings: Any,
) -> Program:  # fmt: skip
    """The collectives with what the model chooses, in pieces of so many bytes."""
    program = Program.of(transport, members, **settings)
    program.backends.choice.set_model(model)
    program.backends.retune("", piece_bytes)
    return program


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "name",
    [
        name if name in EVERYWHERE else pytest.param(name, marks=pytest.mark.soak)
        for name in LAYOUTS
    ],
)
def test_every_dtype_and_op(name: str, model: str) -> None:
    def program(transport: Transport) -> None:
        p = program_of(transport, MODELS[model], 64)
        for number, dtype in enumerate(DTYPES if name == "3+1+2" else FEW_DTYPES):
            assert p.backend("allgather", dtype).name in ("HIERARCHICAL", "FLAT")
            p.everything(dtype, (number, 101, 0))

    run_on_transports(Topology(LAYOUTS[name]), program)


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_hosts_and_pieces(seed: int, native: str) -> None:
    """Fused tensors of sizes around the borders of pieces, in the order of random hosts."""
    chance = random.Random(seed)
    ranks = list(range(chance.randint(3, 7)))
    chance.shuffle(ranks)
    cuts = sorted(chance.sample(range(1, len(ranks)), chance.randint(1, min(3, len(ranks) - 1))))
    parts = [ranks[a:b] for a, b in zip([0, *cuts], [*cuts, len(ranks)], strict=True)]
    hosts = tuple(sorted(tuple(sorted(part)) for part in parts))
    piece_bytes = chance.choice([16, 256, 1 << 18])
    sizes = [chance.choice([0, 1, 63, 64, 65, chance.randint(0, 3000)]) for _ in range(5)]
    if len(hosts) < 2:
        return
    dtype, model = chance.choice(DTYPES), chance.choice([*MODELS.values()])

    def program(transport: Transport) -> None:
        p = program_of(transport, model, piece_bytes, native=native)
        p.reducescatter(dtype, sizes, SUM)
        p.allgather(dtype, sizes)
        p.alltoall(dtype, sizes[0])
        for root in range(p.members.size):
            arrays = [values(p.members.index + salt, n, dtype) for salt, n in enumerate(sizes)]
            p.backend("broadcast", dtype).broadcast(p.members, arrays, root, quiet)
            for salt, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
                np.testing.assert_array_equal(array, values(root + salt, size, dtype))

    run_on_transports(Topology(hosts), program)


@pytest.mark.parametrize(
    ("name", "model"), [("3+1+2", FEW_ROUNDS), ("2+2", FEW_BYTES)], ids=["3+1+2", "2+2"]
)
def test_over_tcp_and_many_pieces(name: str, model: Model) -> None:
    def program(transport: Transport) -> None:
        p = program_of(transport, model, 16 << 10)
        p.reducescatter("float32", (5, 90_000, 0, 3), SUM)
        p.allgather("float32", (5, 200_000, 0, 3))
        p.broadcast("float32", 300_000)
        p.alltoall("float32", 90_000)

    run_on_transports(Topology(LAYOUTS[name]), program, TCP, Config(tcp_streams=2))


# -- sums


def scattered(
    hosts: Any, sizes: list[int], dtype: str, model: Model, piece_bytes: int, **settings: Any
) -> list[list[Array]]:
    """The parts of all ranks of a reducescatter of noise."""

    def program(transport: Transport) -> list[Array]:
        p = program_of(transport, model, piece_bytes, **settings)
        counts = [uneven(size, p.members.size) for size in sizes]
        inputs = [noise(transport.rank, size, dtype) for size in sizes]
        outputs = [np.empty(each[transport.rank], numpy_dtype(dtype)) for each in counts]
        backend = p.backend("reducescatter", dtype)
        backend.reducescatter(p.members, inputs, outputs, counts, SUM, quiet)
        return outputs

    return run_on_transports(Topology(hosts), program)


@pytest.mark.parametrize(
    ("name", "dtype", "model"),
    [
        ("3+1+2", "float32", FEW_ROUNDS),
        ("3+1+2", "bfloat16", FEW_BYTES),
        ("2x5", "float32", FEW_BYTES),
        ("2x5", "bfloat16", FEW_ROUNDS),
    ],
)
def test_no_bit_of_a_sum_depends_on_pieces_fusion_or_run(
    name: str, dtype: str, model: Model
) -> None:
    hosts, sizes = LAYOUTS[name], [7, 1000, 1, 0, 5001]
    runs = [
        scattered(hosts, sizes, dtype, model, piece_bytes, native=native)
        for piece_bytes, native in ((1 << 18, "auto"), (512, "auto"), (512, "off"))
    ]
    alone = [scattered(hosts, [size], dtype, model, 1 << 18) for size in sizes]
    for run in runs:
        for rank, arrays in enumerate(run):
            for tensor, array in enumerate(arrays):
                assert array.tobytes() == alone[tensor][rank][0].tobytes()


def test_a_tensor_has_its_own_algorithm_whatever_it_is_fused_with() -> None:
    # Far bytes and copies are dear, so that large tensors take the ring, and small ones halving.
    model = Model(message=1e-3, byte=1e-6, far_byte=2e-6, copied_byte=1e-6)
    hosts, sizes = LAYOUTS["2x5"], [30, 40_000, 11, 30_000]
    for size, name in ((30, "halving"), (30_000, "ring")):
        assert cheapest_of(model, "scatter", len(hosts), 2, 4 * size) == name
    together = scattered(hosts, sizes, "float32", model, 1 << 18)
    for number, size in enumerate(sizes):
        alone = scattered(hosts, [size], "float32", model, 1 << 18)
        for arrays, (wanted,) in zip(together, alone, strict=True):
            assert arrays[number].tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", ["2+2", "2+3+2", "flat"])
def test_the_order_of_a_sum_in_a_ring_is_that_of_the_hosts(name: str) -> None:
    """Ranks of a host in order; then from the host behind the owner's around to that one."""
    hosts, size = LAYOUTS[name], 2000
    parts = scattered(hosts, [size], "float32", FEW_BYTES, 256)
    sums = [sum((noise(r, size) for r in host[1:]), noise(host[0], size)) for host in hosts]
    counts = uneven(size, len(parts))
    for number, host in enumerate(hosts):
        around = [sums[(number + distance) % len(hosts)] for distance in range(1, len(hosts) + 1)]
        total = sum(around[1:], around[0])
        for rank in host:
            start = sum(counts[:rank])
            assert parts[rank][0].tobytes() == total[start : start + counts[rank]].tobytes()


@pytest.mark.parametrize("model", [FEW_ROUNDS, FEW_BYTES], ids=["few rounds", "few bytes"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_are_rounded_once_by_each_host(dtype: str, model: Model) -> None:
    hosts, size = LAYOUTS["2+3+2"], 5000
    result = np.concatenate([part for (part,) in scattered(hosts, [size], dtype, model, 1 << 18)])
    sums = [sum(noise(r, size, dtype).astype(np.float64) for r in host) for host in hosts]
    spacing, tiny = (2.0**-10, 2.0**-24) if dtype == "float16" else (2.0**-7, 2.0**-133)
    rounding = np.sum(np.abs(sums), axis=0) * spacing / 2 + tiny
    widest = np.max([np.abs(noise(r, size, dtype)) for r in range(7)], axis=0).astype(np.float64)
    error = np.abs(result.astype(np.float64) - np.sum(sums, axis=0))
    assert np.all(error <= len(hosts) * rounding + widest * 2.0**-20)


# -- what goes from host to host


class Counted:
    """A transport that counts what it sends to other hosts."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self.nbytes = 0
        self.messages: Counter[int] = Counter()  # by the number of the host to which they go

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def isend(self, rank: int, array: Array) -> Pending:
        """Count, and send."""
        host_of = self._transport.topology.host_of
        if host_of[rank] != host_of[self._transport.rank] and array.size:
            self.nbytes += array.nbytes
            self.messages[host_of[rank]] += 1
        return self._transport.isend(rank, array)


def sent(hosts: Any, collective: str, size: int, model: Model, **settings: Any) -> list[Counted]:
    """What the ranks have sent in one collective of bytes."""

    def program(transport: Transport) -> Counted:
        counted: Any = Counted(transport)
        p = program_of(counted, model, 1 << 18, **settings)
        if collective == "reducescatter":
            p.reducescatter("uint8", [size], SUM)
        elif collective == "allgather":
            p.allgather("uint8", [size])
        else:
            getattr(p, collective)("uint8", size)
        return counted

    return run_on_transports(Topology(hosts), program)


@pytest.mark.parametrize("collective", ["reducescatter", "allgather"])
@pytest.mark.parametrize("model", [FEW_ROUNDS, FEW_BYTES], ids=["few rounds", "few bytes"])
@pytest.mark.parametrize("name", ["2+2", "2+3+2", "2x5"])
def test_each_byte_crosses_the_border_of_a_host_once(
    name: str, model: Model, collective: str
) -> None:
    hosts, size = LAYOUTS[name], 40_000
    ranks = sum(map(len, hosts))
    every = [each.nbytes for each in sent(hosts, collective, size, model)]
    total = sum(every)
    assert total == (len(hosts) - 1) * size
    if model is FEW_BYTES and name != "2+3+2":
        assert min(every) > 0  # The members of a host share its link.
    flat = sum(each.nbytes for each in sent(hosts, collective, size, model, data_plane="ring"))
    assert flat > total * (ranks - 1) / ranks * len(hosts) / (len(hosts) - 1) * 0.9


@pytest.mark.parametrize("name", ["2+2", "3+1+2", "2x5", "flat"])
def test_a_broadcast_is_sent_to_each_other_host_once(name: str) -> None:
    hosts, size = LAYOUTS[name], 500_000
    for model in (FEW_ROUNDS, FEW_BYTES):
        every = sent(hosts, "broadcast", size, model)
        assert sum(each.nbytes for each in every) == (len(hosts) - 1) * size
    assert max(each.nbytes for each in every) <= size  # What costs bytes sends them on once.


@pytest.mark.parametrize("name", ["2+2", "3+1+2", "2+3+2"])
def test_small_data_for_a_host_are_one_message(name: str) -> None:
    """A message of counts and a bundle for each other host; the ranks take turns."""
    hosts = LAYOUTS[name]
    every = sent(hosts, "alltoall", 200, FEW_ROUNDS)
    for host in hosts:
        together = sum((every[rank].messages for rank in host), Counter())
        assert list(together.values()) == [2] * (len(hosts) - 1)
    counts = sum(len(a) * len(b) * 8 for a in hosts for b in hosts if a != b)
    size = sum(map(len, hosts))
    remote = sum(
        (uneven(200, size)[i:] + uneven(200, size)[:i])[j]
        for i in range(size) for j in range(size)
        if not any(i in host and j in host for host in hosts)
    )  # fmt: skip
    assert sum(each.nbytes for each in every) == counts + remote


def test_the_members_of_a_host_take_turns_with_its_messages() -> None:
    """Each of two ranks sends the counts and the bundles for two of four hosts."""
    every = sent(LAYOUTS["2x5"], "alltoall", 2000, FEW_ROUNDS)
    assert [each.messages.total() for each in every] == [4] * 10


def test_sums_come_to_their_owners_where_hosts_are_alike() -> None:
    """Else they are handed out inside the hosts that have more ranks than slices."""

    def program(transport: Transport) -> list[str]:
        phases: list[str] = []

        def noted(phase: str) -> AbstractContextManager[object]:
            phases.append(phase)
            return nullcontext()

        p = program_of(transport, Model(), 1 << 18)
        counts = [[5] * p.members.size]
        inputs, outputs = [np.ones(sum(counts[0]))], [np.zeros(5)]
        backend = p.backend("reducescatter", "float64")
        backend.reducescatter(p.members, inputs, outputs, counts, SUM, noted)
        assert outputs[0].tolist() == [p.members.size] * 5
        return [phase for phase in phases if phase == "SHM_ALLTOALL"]

    assert not any(run_on_transports(Topology(LAYOUTS["2x5"]), program))
    handed_out = [bool(each) for each in run_on_transports(Topology(LAYOUTS["2+3+2"]), program)]
    assert handed_out == [False, True, False, False, True, False, True]


def test_large_data_go_from_rank_to_rank() -> None:
    hosts = LAYOUTS["2+2"]
    every = sent(hosts, "alltoall", 1 << 20, Model())
    assert [each.messages.total() for each in every] == [3, 2, 3, 2]  # Leaders send the counts.


def test_nothing_is_sent_where_counts_are_zero() -> None:
    def program(transport: Transport) -> Any:
        counted: Any = Counted(transport)
        p = program_of(counted, FEW_ROUNDS, 1 << 18)
        received: list[Array] = []

        def allocate(counts: list[int]) -> Array:
            received.append(np.empty(sum(counts), np.float32))
            assert counts == ([3, 0, 0, 0] if transport.rank == 3 else [0] * 4)
            return received[0]

        counts = [0, 0, 0, 3] if transport.rank == 0 else [0] * 4
        array = np.arange(sum(counts), dtype=np.float32)
        p.backend("alltoall", "float32").alltoall(p.members, array, counts, allocate, quiet)
        return received[0].tolist(), counted.messages.total()

    results = run_on_transports(Topology(LAYOUTS["2+2"]), program)
    assert [got for got, _ in results] == [[], [], [], [0, 1, 2]]
    assert sum(messages for _, messages in results) == 3  # Counts in both directions, and a bundle.


@pytest.mark.parametrize(
    ("chosen", "ranks", "messages"), [(FEW_BYTES, 1, 6), (FEW_BYTES, 2, 8), (FEW_ROUNDS, 2, 4)]
)
def test_the_messages_and_bytes_of_an_alltoall(chosen: Model, ranks: int, messages: int) -> None:
    """Of 4 hosts: the counts for 3 hosts are shared by the ranks, and so are bundles.

    Straight, a rank sends to each rank of the others.
    """
    hosts = tuple(tuple(range(first, first + ranks)) for first in range(0, 4 * ranks, ranks))
    members, nbytes = 4 * ranks, 64 * 4 * ranks

    def program(transport: Transport) -> Counted:
        counted: Any = Counted(transport)
        p = program_of(counted, chosen, 1 << 18)
        array = np.zeros(nbytes, np.uint8)
        backend = p.backend("alltoall", "uint8")
        backend.alltoall(p.members, array, [64] * members, lambda got: np.empty_like(array), quiet)
        return counted

    counted = run_on_transports(Topology(hosts), program)
    assert messages == max(each.messages.total() for each in counted)
    counts = 3 * 8 * ranks * ranks  # A number for each pair of ranks.
    wire = max(sum(counted[rank].nbytes for rank in host) for host in hosts) - counts
    assert wire == ranks * nbytes * 3 / 4


# -- the ways of a broadcast


@pytest.mark.parametrize("name", PATHS)
def test_paths_reach_every_host_once_from_its_parent(name: str) -> None:
    for hosts in range(2, 41):
        for root in {0, 1, hosts - 1}:
            paths = [paths_of(name, hosts, root, host) for host in range(hosts)]
            for way in range(len(paths[0])):
                parents = {
                    child: host for host in range(hosts) for child in paths[host][way].children
                }
                assert sorted(parents) == [host for host in range(hosts) if host != root]
                for host in range(hosts):
                    assert paths[host][way].parent == parents.get(host)
                    at, steps = host, 0
                    while at != root:
                        at, steps = parents[at], steps + 1
                        assert steps < hosts, "a circle"


def test_two_trees_send_each_byte_on_once() -> None:
    for hosts in range(2, 41):
        for host in range(hosts):
            sends = [len(path.children) for path in paths_of("trees", hosts, 0, host)]
            assert sum(sends) <= 2  # Of halves.


class Late:
    """A transport whose receives from one rank are not done until another one has sent enough."""

    def __init__(self, transport: Transport, late: int, first: int) -> None:
        self._transport = transport
        self._late = late
        self._left = first  # Receives from other ranks that come before.

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def wait_for_any(self, pendings: Sequence[Pending]) -> None:
        """Wait, for all but the late one while it is late."""
        timely = [each for each in pendings if each.rank != self._late]
        if self._left and not timely:
            raise AssertionError(f"waits for rank {self._late}, and has others to wait for")
        self._transport.wait_for_any(timely if self._left else pendings)

    def irecv(self, rank: int, array: Array) -> Pending:
        """Receive; what is late counts as done only later."""
        pending = self._transport.irecv(rank, array)
        return _LatePending(self, pending) if rank == self._late else _CountedPending(self, pending)


class _LatePending:
    def __init__(self, late: Late, pending: Pending) -> None:
        self.late, self.pending, self.rank = late, pending, pending.rank

    def done(self) -> bool:
        """Return whether it may be taken."""
        return not self.late._left and self.pending.done()


class _CountedPending:
    def __init__(self, late: Late, pending: Pending) -> None:
        self.late, self.pending, self.rank = late, pending, pending.rank
        self.was_done = False

    def done(self) -> bool:
        """Return whether it has come, and count it once."""
        if not self.was_done and self.pending.done():
            self.was_done = True
            self.late._left = max(0, self.late._left - 1)
        return self.was_done


def test_a_host_that_is_late_in_one_tree_holds_up_nothing_of_the_other() -> None:
    """Rank 2 gets half of 8 pieces from each of two hosts; all of one come before any of the other.

    In turns it would wait for the second piece, which is late, with the third one there.
    """
    hosts = tuple((rank,) for rank in range(6))
    parents = [path.parent for path in paths_of("trees", 6, 0, 2)]
    assert len({*parents}) == 2

    def program(transport: Transport) -> None:
        if transport.rank == 2:
            transport = Late(transport, parents[1], 4)  # type: ignore[assignment,arg-type]
        p = program_of(transport, Model(), 64)
        p.backends.choice.path = lambda hosts, nbytes: "trees"  # type: ignore[method-assign]
        p.broadcast("float32", 128)

    run_on_transports(Topology(hosts), program)


# -- members


def test_only_the_members_of_a_process_set_take_part() -> None:
    topology = Topology(((0, 1), (2, 3), (4, 5), (6,)))
    ranks = (1, 2, 4, 5, 6)

    def program(transport: Transport) -> None:
        if transport.rank not in ranks:
            return
        members = Members(ranks, ranks.index(transport.rank), topology.restrict(ranks))
        p = program_of(transport, FEW_ROUNDS, 256, members)
        p.everything("float32", (0, 301))

    run_on_transports(topology, program)


@pytest.mark.parametrize("kind", [IN_PROCESS, TCP])
@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("gone", [0, 3])
def test_a_member_that_leaves_in_the_middle_is_named(gone: int, collective: str, kind: str) -> None:
    def program(transport: Transport) -> BaseException | None:
        p = program_of(transport, Model(), 4096)
        try:
            for turn in range(4):
                if transport.rank == gone and turn == 2:
                    return None  # It closes its transport.
                if collective == "reducescatter":
                    p.reducescatter("float32", (20_000,), SUM)
                elif collective == "allgather":
                    p.allgather("float32", (20_000,))
                elif collective == "broadcast":
                    array = np.full(50_000, 1.0)
                    root = 0 if gone == 0 else 4  # What is sent on does not need to be waited for.
                    p.backend("broadcast", "float64").broadcast(p.members, [array], root, quiet)
                    p.allgather("float32", (100,))
                else:
                    p.alltoall("float32", 20_000)
        except PeerLostError as error:
            return error
        return AssertionError("nobody has noticed")

    errors = run_on_transports(Topology(LAYOUTS["2+3+2"]), program, kind)
    lost = [error for rank, error in enumerate(errors) if rank != gone]
    assert all(isinstance(error, PeerLostError) for error in lost), lost
    assert gone in {error.rank for error in lost if isinstance(error, PeerLostError)}


@pytest.mark.parametrize("native", ["auto", "off"])
def test_ranks_join_while_others_go_on(native: str) -> None:
    """Joined ranks give no rows, and their hosts pass on what others send."""

    def main(rank: int) -> Any:
        if rank in (1, 3):
            hvd.join()
            return None
        gathered = hvd.allgather(np.full((rank + 1, 2), rank), name="rows")
        copy = hvd.broadcast(np.full(5, rank), root_rank=2, name="copy")
        part = hvd.reducescatter(np.arange(8.0) + rank, op=hvd.Sum, name="part")
        given, counts = hvd.alltoall(np.arange(4) + 10 * rank, splits=[1, 1, 1, 1], name="exchange")
        hvd.join()
        return gathered.tolist(), copy.tolist(), part.tolist(), given.tolist(), list(counts)

    results = run_ranks(4, main, hosts=[[0], [1, 2, 3]], config=Config(native=native))
    rows = [[0, 0]] + [[2, 2]] * 3
    assert results[0] == (rows, [2] * 5, [2.0, 4.0], [0, 20], [1, 0, 1, 0])
    assert results[2] == (rows, [2] * 5, [10.0, 12.0], [2, 22], [1, 0, 1, 0])
