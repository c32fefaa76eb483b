"""How ranks store into their slots: the choice follows the times, and never the bits."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Reduction
from hvdlite.common.collectives.native import collectives as native
from hvdlite.common.collectives.native import kernel
from hvdlite.common.collectives.native.compiler import find_compiler
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Transport
from tests.backends import all_members, quiet, run_on_transports
from tests.common.collectives.test_native_shm import found
from tests.limits import HANG_SECONDS

pytestmark = pytest.mark.timeout(240)
PERIOD = 256  # rounds from one trial of a member to its next one
Fill = Callable[..., list[str]]


# -- the choice


@pytest.fixture(scope="module")
def fill(tmp_path_factory: pytest.TempPathFactory) -> Fill:
    """Return a function that fills slots in stages of (rounds, plain ns, streamed ns)."""
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = Path(__file__).with_name("slot_stores.cc")
    program = tmp_path_factory.mktemp("stores") / "slot_stores"
    flags = ("-std=c++17", "-w", "-I", str(kernel.FOLDER))
    subprocess.run([*compiler, *flags, source, "-o", program], check=True, timeout=HANG_SECONDS)

    def run(*stages: tuple[int, int, int], turn: int = 0) -> list[str]:
        words = [str(number) for stage in stages for number in stage]
        done = subprocess.run(
            [program, str(turn), *words],
            capture_output=True,
            text=True,
            timeout=HANG_SECONDS,
            check=True,
        )
        return done.stdout.split()

    return run


def test_a_rank_streams_where_that_is_faster(fill: Fill) -> None:
    rounds = fill((PERIOD, 300, 100))
    assert rounds[:5] == ["01000000"] * 5  # the trial
    assert rounds[5] == "00111111"  # the first pieces after it
    assert set(rounds[6:]) == {"11111111"}


@pytest.mark.parametrize("streamed", [100, 99, 81, 80, 500])
def test_it_stays_plain_where_a_stream_gains_little(fill: Fill, streamed: int) -> None:
    rounds = fill((PERIOD, 100, streamed))
    assert rounds == ["01000000"] * 5 + ["00000000"] * (PERIOD - 5)


@pytest.mark.parametrize("turn", [0, 3, 31, 32, 255])
def test_it_follows_processes_that_move(fill: Fill, turn: int) -> None:
    rounds = fill((PERIOD, 300, 100), (PERIOD, 100, 110), (PERIOD, 300, 100), turn=turn)
    at_the_end = [rounds[end * PERIOD - 1] for end in (1, 2, 3)]
    assert at_the_end == ["11111111", "00000000", "11111111"]


def test_trials_are_few_and_of_one_member_at_a_time(fill: Fill) -> None:
    tried: list[int] = []
    for turn in range(32):
        rounds = fill((2 * PERIOD, 100, 100), turn=turn)
        assert sum(map(int, "".join(rounds))) == 10
        tried += [number for number, each in enumerate(rounds) if "1" in each]
    assert len(tried) == len(set(tried))


@pytest.mark.parametrize("times", [(-1, 100), (300, -1), (-1, -1)])
def test_what_was_not_timed_changes_nothing(fill: Fill, times: tuple[int, int]) -> None:
    assert fill((PERIOD, *times)) == ["01000000"] * 5 + ["00000000"] * (PERIOD - 5)


def test_a_large_call_times_both_ways_of_every_collective() -> None:
    here = found()
    elements = 7 * native.SLOTS * native.PIECE_BYTES  # of one byte: seven rounds, a trial has six

    def program(transport: Transport) -> list[int]:
        backend, members = ShmBackend(transport, here), all_members(transport)
        mine, part = np.ones(2 * elements, np.uint8), np.empty(elements, np.uint8)
        result = np.empty(2 * elements, np.uint8)
        counts = [[elements] * 2]
        reduction = Reduction(ReduceOp.MAX)
        backend.allreduce(members, [mine], [mine], reduction, quiet)
        backend.reducescatter(members, [mine], [part], counts, reduction, quiet)
        backend.allgather(members, [part], [result], counts, quiet)
        backend.alltoall(members, mine, counts[0], lambda _: result, quiet)
        backend.broadcast(members, [mine], 0, quiet)
        assert backend._native is not None
        (group,) = backend._native._groups.values()
        least: list[int] = group[2][:, 4:6].ravel().tolist()  # of SlotStores
        return least

    first, _ = run_on_transports(Topology.single_host(2), program)
    assert len(first) == 10
    assert all(0 < ns < 10**11 for ns in first)


# -- the bits


def numbers(rank: int, dtype: str, sizes: Sequence[int]) -> list[Array]:
    """Arrays that begin anywhere, also across the lines of the cache."""
    generator, kind = np.random.default_rng(rank), numpy_dtype(dtype)
    arrays = []
    for number, size in enumerate(sizes):
        memory = np.zeros(size + 70, kind)
        view = memory[5 * number % 67 + 1 :][:size]
        view[...] = generator.integers(-9, 9, size).astype(kind) if size else 0
        arrays.append(view)
    return arrays


def like(arrays: Sequence[Array], sizes: Sequence[int]) -> tuple[list[Array], list[Array]]:
    """Results of these sizes, and the memory around each, which is full of sevens."""
    memories = [np.full(size + 70, 7, arrays[0].dtype) for size in sizes]
    views = [
        memory[3 * number % 67 + 1 :][:size]
        for number, (memory, size) in enumerate(zip(memories, sizes, strict=True))
    ]
    return views, memories


def check(views: Sequence[Array], memories: Sequence[Array], expected: Sequence[Array]) -> None:
    for number, (view, memory, wanted) in enumerate(zip(views, memories, expected, strict=True)):
        assert view.tobytes() == wanted.tobytes()
        start = 3 * number % 67 + 1
        assert (memory[:start] == 7).all()
        assert (memory[start + view.size :] == 7).all()


def everything(transport: Transport, dtype: str, sizes: Sequence[int], stores: int) -> None:
    """Run every collective, and compare with numpy."""
    backend = ShmBackend(transport, found(), stores=stores)
    members = all_members(transport)
    count, me = members.size, members.index
    every = [numbers(rank, dtype, sizes) for rank in range(count)]
    mine = every[me]
    total = []
    for parts in zip(*every, strict=True):
        so_far = parts[0].copy()
        for part in parts[1:]:
            so_far = so_far + part  # small whole numbers: every order of adding gives the same bits
        total.append(so_far)
    sum_of_all = Reduction(ReduceOp.SUM)

    views, memories = like(mine, sizes)
    backend.allreduce(members, mine, views, sum_of_all, quiet)
    check(views, memories, total)
    in_place, memories = like(mine, sizes)
    for view, given in zip(in_place, mine, strict=True):
        view[...] = given
    backend.allreduce(members, in_place, in_place, sum_of_all, quiet)
    check(in_place, memories, total)

    counts = [[size // count + (rank < size % count) for rank in range(count)] for size in sizes]
    starts = [sum(each[:me]) for each in counts]
    owns = [each[me] for each in counts]
    pieces = [slice(start, start + own) for start, own in zip(starts, owns, strict=True)]
    views, memories = like(mine, owns)
    backend.reducescatter(members, mine, views, counts, sum_of_all, quiet)
    check(views, memories, [each[piece] for each, piece in zip(total, pieces, strict=True)])

    views, memories = like(mine, sizes)
    given = [each[piece] for each, piece in zip(mine, pieces, strict=True)]
    backend.allgather(members, given, views, counts, quiet)
    expected = []
    for number, each in enumerate(counts):
        ends = np.cumsum(each)
        parts = [every[rank][number][ends[rank] - each[rank] : ends[rank]] for rank in range(count)]
        expected.append(np.concatenate(parts))
    check(views, memories, expected)

    for number, each in enumerate(counts):
        ends = np.cumsum(each)
        wanted = np.concatenate(
            [every[rank][number][ends[me] - each[me] : ends[me]] for rank in range(count)]
        )
        (view,), memories = like(mine, [wanted.size])
        backend.alltoall(members, mine[number], each, lambda _, view=view: view, quiet)
        check([view], memories, [wanted])

    views, memories = like(mine, sizes)
    for view, given_here in zip(views, mine, strict=True):
        view[...] = given_here
    backend.broadcast(members, views, count - 1, quiet)
    check(views, memories, every[-1])


WAYS = {"measured": native.MEASURED, "plain": native.ALL_PLAIN, "streamed": native.ALL_STREAMED}


@pytest.mark.parametrize("streamed_bytes", [0, 1 << 62], ids=["past the caches", "cached"])
@pytest.mark.parametrize(
    ("size", "dtype", "way"),
    [  # Any two come together.
        (2, "float32", "measured"),
        (2, "float16", "plain"),
        (2, "uint8", "streamed"),
        (3, "float32", "streamed"),
        (3, "float16", "measured"),
        (3, "uint8", "plain"),
        (4, "float32", "plain"),
        (4, "float16", "streamed"),
        (4, "uint8", "measured"),
    ],
)
def test_every_way_gives_the_numbers_of_numpy(
    size: int, dtype: str, way: str, streamed_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STREAMED_BYTES", streamed_bytes)
    piece = native.PIECE_BYTES // numpy_dtype(dtype).itemsize
    sizes = [1, 63, 0, 64, 65, 2047, 2048, 2049, *[7] * 50, piece - 1, piece, piece + 1, 2 * piece]
    run_on_transports(
        Topology.single_host(size), partial(everything, dtype=dtype, sizes=sizes, stores=WAYS[way])
    )


@pytest.mark.parametrize(("size", "way"), [(3, "measured"), (2, "plain"), (2, "streamed")])
def test_many_rounds_of_slots_give_the_numbers_of_numpy(
    size: int, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PIECE_BYTES", 8 << 10)
    # Past the trials of all members, also where each gives its part.
    elements = 30 * size * native.SLOTS * native.PIECE_BYTES // 4 + 3
    program = partial(everything, dtype="float32", sizes=[5, elements], stores=WAYS[way])
    run_on_transports(Topology.single_host(size), program)


def test_ranks_need_not_store_alike() -> None:
    ways = (native.ALL_STREAMED, native.ALL_PLAIN, native.MEASURED)

    def program(transport: Transport) -> None:
        everything(transport, "float32", [3, 3_000_000, 70], ways[transport.rank])

    run_on_transports(Topology.single_host(3), program)
