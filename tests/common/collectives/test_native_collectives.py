"""All compiled collectives of one host beside Python's, and beside the numpy oracle."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.kernels import Arithmetic
from hvdlite.common.collectives.native import collectives as native
from hvdlite.common.collectives.native.segment import TYPES, codes
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Transport
from tests import ranks
from tests.backends import Program, all_members, quiet, run_on_transports
from tests.common.collectives.test_native_shm import found

pytestmark = pytest.mark.timeout(240)
OPS = (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)


def on_ranks(size: int, program: Callable[[Transport], Any]) -> list[Any]:
    return run_on_transports(Topology.single_host(size), program)


FEW_SLOTS, MANY_SLOTS = 0, 1 << 62  # bytes that those of all ranks may have


@pytest.mark.parametrize(
    ("size", "dtype", "slot_bytes"),
    [(2, "float32", FEW_SLOTS), (3, "int16", FEW_SLOTS), (3, "float32", MANY_SLOTS)],
)
def test_more_than_the_slots_hold(
    size: int, dtype: str, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "HOST_SLOT_BYTES", slot_bytes)
    monkeypatch.setattr(native, "PIECE_BYTES", 8 << 10)
    elements = 2 * native.SLOTS * native.PIECE_BYTES // numpy_dtype(dtype).itemsize + 5
    found()

    def program(transport: Transport) -> None:
        program = Program.of(transport, native="on")
        program.allreduce(dtype, [3, elements], Reduction(ReduceOp.MAX))
        program.reducescatter(dtype, [elements, 7], Reduction(ReduceOp.SUM))
        program.allgather(dtype, [1, elements, 0, 5])
        program.broadcast(dtype, elements)
        program.alltoall(dtype, elements)

    on_ranks(size, program)


@pytest.mark.parametrize("streamed_bytes", [0, 1 << 62], ids=["past the caches", "plain"])
def test_no_byte_beside_the_result_is_written(
    streamed_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STREAMED_BYTES", streamed_bytes)
    here = found()

    def program(transport: Transport) -> None:
        backend, members = ShmBackend(transport, here), all_members(transport)
        for start in (0, 1, 15, 33, 63):
            for length in (1, 2, 63, 64, 65, 130, 1000):
                memory = np.full(1200, 99, np.uint8)
                target = memory[start : start + length]
                target[...] = transport.rank
                backend.broadcast(members, [target], 1, quiet)
                assert (target == 1).all()
                own = np.full(length // 2 + transport.rank * (length % 2), transport.rank, np.uint8)
                counts = [length // 2, length // 2 + length % 2]
                backend.allgather(members, [own], [target], [counts], quiet)
                assert target.tolist() == [0] * counts[0] + [1] * counts[1]
                target[...] = 3
                sent = np.full(length, transport.rank, np.uint8)
                rows = [[0, length], [length, 0]][transport.rank]
                backend.alltoall(members, sent, rows, lambda counts, t=target: t, quiet)
                assert (target == 1 - transport.rank).all()
                assert (memory[:start] == 99).all()
                assert (memory[start + length :] == 99).all()

    on_ranks(2, program)


def wild(rank: int, dtype: str, size: int) -> Array:
    """Numbers of every size, but for a zero that has a sign and what is no number."""
    generator, kind = np.random.default_rng(rank), numpy_dtype(dtype)
    if kind.kind in "iu":
        limits = np.iinfo(kind)
        return generator.integers(limits.min, limits.max, size, kind, endpoint=True)
    exponents = generator.integers(-6, 5, size)
    return (generator.standard_normal(size) * 2.0**exponents + 0.01).astype(kind)


BITS = (ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR)
WHOLE = [dtype for dtype in TYPES if "int" in dtype]
CASES = [*product(TYPES, OPS), *product(WHOLE, BITS)]


@pytest.mark.parametrize(("dtype", "op"), CASES, ids=lambda part: getattr(part, "name", part))
def test_reductions_have_the_bits_of_python(
    dtype: str, op: ReduceOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, size = found(), 3 * 4099 + 1
    reduction = Reduction(op, 0.7, 1.3) if numpy_dtype(dtype).kind not in "iu" else Reduction(op)

    def program(transport: Transport, members_count: int) -> None:
        members = all_members(transport)
        mine, counts = wild(transport.rank, dtype, size), [[size // members_count] * members_count]
        counts[0][-1] += size % members_count
        results = []
        for library in (here, None):
            backend, total = ShmBackend(transport, library), np.empty_like(mine)
            part = np.empty(counts[0][members.index], mine.dtype)
            backend.allreduce(members, [mine], [total], reduction, quiet)
            backend.reducescatter(members, [mine], [part], counts, reduction, quiet)
            results.append([total.tobytes(), part.tobytes()])
        assert results[0] == results[1]
        assert codes(Arithmetic(mine.dtype, reduction)) is not None  # it was compiled

    for count, streamed_bytes in ((2, 0), (3, 1 << 62)):
        monkeypatch.setattr(native, "STREAMED_BYTES", streamed_bytes)
        on_ranks(count, partial(program, members_count=count))


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_what_is_no_number_stays_none(dtype: str, op: ReduceOp) -> None:
    here, count = found(), 3
    special = [np.nan, -np.inf, np.inf, 1.0]

    def program(transport: Transport) -> None:
        given = np.roll(np.repeat(special, 16), 16 * transport.rank).astype(numpy_dtype(dtype))
        every = [np.roll(np.repeat(special, 16), 16 * rank) for rank in range(count)]
        expected = (np.minimum if op is ReduceOp.MIN else np.maximum).reduce(every)
        ShmBackend(transport, here).allreduce(
            all_members(transport), [given], [given], Reduction(op), quiet
        )
        np.testing.assert_array_equal(given.astype(np.float64), expected)

    on_ranks(count, program)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_stage_that_does_not_round_is_compiled(dtype: str) -> None:
    """The hierarchical allreduce adds 16-bit floats inside a host in float32."""
    here, size = found(), 10_007
    arithmetic = Arithmetic(numpy_dtype(dtype), Reduction(ReduceOp.SUM, 0.3)).inner()

    def program(transport: Transport) -> None:
        members, parts = all_members(transport), []
        counts = [[5000, size - 5000]]
        mine = wild(transport.rank, dtype, size)
        for library in (here, None):
            part = np.empty(counts[0][members.index], np.float32)
            backend = ShmBackend(transport, library)
            backend.reduce_parts(members, [mine], [part], counts, arithmetic)
            parts.append(part.tobytes())
        assert parts[0] == parts[1]
        assert codes(arithmetic) is not None

    on_ranks(2, program)


def collective_of(
    transport: Transport, backend: ShmBackend, name: str, group: Members, pieces: int
) -> None:
    """Run one collective, larger than the slots, and check its result."""
    count, me = group.size, group.index
    elements = pieces * native.PIECE_BYTES // 4
    mine = np.full(elements, float(group.ranks[me]), np.float32)
    every = [float(rank) for rank in group.ranks]
    counts = [[elements] * count]
    if name == "allreduce":
        backend.allreduce(group, [mine], [mine], Reduction(ReduceOp.SUM), quiet)
        assert (mine == sum(every)).all()
    elif name == "allgather":
        result = np.empty(elements * count, np.float32)
        backend.allgather(group, [mine], [result], counts, quiet)
        assert (result.reshape(count, -1) == np.array(every, np.float32)[:, None]).all()
    elif name == "reducescatter":
        whole, part = np.tile(mine, count), np.empty(elements, np.float32)
        backend.reducescatter(group, [whole], [part], counts, Reduction(ReduceOp.SUM), quiet)
        assert (part == sum(every)).all()
    elif name == "alltoall":
        result = np.empty(elements * count, np.float32)
        backend.alltoall(group, np.tile(mine, count), counts[0], lambda _: result, quiet)
        assert (result.reshape(count, -1) == np.array(every, np.float32)[:, None]).all()
    else:
        backend.broadcast(group, [mine[:3], mine[3:]], count - 1, quiet)
        assert (mine == every[-1]).all()


NAMES = ("allreduce", "allgather", "reducescatter", "alltoall", "broadcast")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("size", "slot_bytes"), [(2, MANY_SLOTS), (3, FEW_SLOTS), (5, FEW_SLOTS)])
def test_every_sleep_of_overlapping_groups_ends_by_a_wake_up(
    size: int, slot_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks look around by themselves after an hour: a wake-up that is missing takes as long."""
    monkeypatch.setattr(native, "HOST_SLOT_BYTES", slot_bytes)
    monkeypatch.setattr(native, "CHECK_SECONDS", 3600.0)
    monkeypatch.setattr(native, "PIECE_BYTES", 8 << 10)  # hundreds of pieces, and of sleeps
    here, lot = found(), random.Random(size)
    groups = [tuple(range(size)), *(tuple(sorted(lot.sample(range(size), 2))) for _ in range(3))]
    turns = [(lot.choice(groups), lot.choice(NAMES)) for _ in range(60)]

    def program(transport: Transport) -> None:
        backend = ShmBackend(transport, here)
        for members, name in turns:
            if transport.rank in members:
                topology = transport.topology.restrict(members)
                group = Members(members, members.index(transport.rank), topology)
                collective_of(transport, backend, name, group, pieces=200)

    on_ranks(size, program)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gone", [0, 1])
def test_a_member_that_leaves_is_named_by_every_collective(name: str, gone: int) -> None:
    here = found()

    def program(transport: Transport) -> int | None:
        backend, group = ShmBackend(transport, here), all_members(transport)
        collective_of(transport, backend, name, group, pieces=2 * native.SLOTS)
        if transport.rank == gone:
            return None
        with pytest.raises(PeerLostError) as raised:
            collective_of(transport, backend, name, group, pieces=2 * native.SLOTS)
        return raised.value.rank

    assert on_ranks(2, program) == [None if rank == gone else gone for rank in range(2)]


def test_broadcasts_of_one_root_and_allgathers_run_together() -> None:

    def main(rank: int) -> list[tuple[str, ...]]:
        runs: list[SegmentRun] = []
        given = [np.full(index, 10.0 * rank + index) for index in range(1, 5)]
        current().engine.observe(runs.append)
        handles = [hvd.broadcast_async(each, index % 2, name=f"b{index}")
                   for index, each in enumerate(given)]  # fmt: skip
        for index, handle in enumerate(handles):
            assert (hvd.synchronize(handle) == 10.0 * (index % 2) + index + 1).all()
        handles = [hvd.allgather_async(each, name=f"g{index}") for index, each in enumerate(given)]
        for index, handle in enumerate(handles):
            result = hvd.synchronize(handle).reshape(2, index + 1)
            assert (result == [[index + 1], [index + 11]]).all()
        return [run.names for run in runs]

    for names in ranks.run_ranks(2, main, config=Config(cycle_time_ms=100)):
        assert names == [
            ("broadcast.b0", "broadcast.b2"),
            ("broadcast.b1", "broadcast.b3"),
            ("allgather.g0", "allgather.g1", "allgather.g2", "allgather.g3"),
        ]
