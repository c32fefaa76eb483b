"""Memory of large results: lent once at a time, kept, limited and released."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.tensors.numpy_adapter import NumpyAdapter
from hvdlite.common.tensors.result_memory import LEAST_BYTES, ResultMemory, result_memory
from tests.ranks import run_ranks

MIB = 1 << 20
LIMIT = 64 * MIB
pytestmark = pytest.mark.timeout(120)


def lent(memory: ResultMemory, nbytes: int) -> np.ndarray:
    """What must be lent."""
    array = memory.lend(nbytes)
    assert array is not None
    return array


def start_of(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_serves_again_once_the_last_view_has_died() -> None:
    memory = ResultMemory(LIMIT)
    first = lent(memory, 5 * MIB + 3)
    assert first.nbytes == 5 * MIB + 3
    assert start_of(first) % 4096 == 0
    start, view = start_of(first), first[8:].view(np.uint8).reshape(-1, 1)[1:]
    del first
    view[...] = 7
    other = lent(memory, 5 * MIB)
    other[...] = 1
    assert start_of(other) != start
    assert (view == 7).all()
    assert memory.kept_bytes == 0
    del view
    assert memory.kept_bytes == 6 * MIB
    assert start_of(lent(memory, 5 * MIB)) == start


def test_what_is_small_or_beyond_the_limit_is_not_lent() -> None:
    memory = ResultMemory(LIMIT)
    assert memory.lend(0) is None
    assert memory.lend(LEAST_BYTES - 1) is None
    assert memory.lend(LIMIT + 1) is None
    assert ResultMemory(0).lend(LEAST_BYTES) is None


def test_no_more_than_the_limit_is_kept() -> None:
    memory = ResultMemory(LIMIT)
    arrays = [lent(memory, size * MIB) for size in (60, 40, 20)]
    starts = [start_of(each) for each in arrays]
    while arrays:
        arrays.pop(0)  # the oldest goes first
        assert memory.kept_bytes <= LIMIT
    assert memory.kept_bytes == 60 * MIB
    assert [start_of(lent(memory, size * MIB)) for size in (40, 20)] == starts[1:]
    memory.release()
    assert memory.kept_bytes == 0


def test_a_small_result_does_not_hold_large_memory() -> None:
    memory = ResultMemory(LIMIT)
    del [lent(memory, 40 * MIB)][0]
    small = lent(memory, 8 * MIB)
    assert memory.kept_bytes == 40 * MIB
    del small
    assert memory.kept_bytes == 48 * MIB


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_nothing_leaks_whatever_sizes_come() -> None:
    memory = ResultMemory(8 * MIB)
    sizes = np.random.default_rng(0).integers(LEAST_BYTES, 8 * MIB, 200)
    for size in sizes[:20]:
        lent(memory, int(size))[:: 1 << 12] = 1
    before = resident_bytes()
    for size in sizes:
        lent(memory, int(size))[:: 1 << 12] = 1
    assert resident_bytes() - before < 32 * MIB


def test_threads_never_share_memory() -> None:
    memory, clashes = ResultMemory(LIMIT), []

    def work(number: int) -> None:
        for turn in range(50):
            array = lent(memory, 4 * MIB + turn % 3)
            array[::4096] = number
            if not (array[::4096] == number).all():
                clashes.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert clashes == []
    assert memory.kept_bytes <= 4 * 2 * 6 * MIB  # a thread may hold two at a time


def test_a_forked_child_has_its_own_copy_and_keeps_nothing() -> None:
    result_memory.keep(LIMIT)
    try:
        array = lent(result_memory, 8 * MIB)
        array[...] = 1
        del [lent(result_memory, 16 * MIB)][0]
        assert result_memory.kept_bytes == 16 * MIB
        child = os.fork()
        if child == 0:
            array[...] = 2
            os._exit(0 if result_memory.kept_bytes == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert (array == 1).all()
    finally:
        result_memory.keep(0)


@pytest.mark.parametrize("limit", [LIMIT, 0])
def test_results_use_it_and_keep_their_values(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_memory, "limit_bytes", limit)
    elements = LEAST_BYTES // 4

    def main(rank: int) -> None:
        results = []
        for turn in range(3):
            given = np.full(elements, turn + 0.5 * rank, np.float32)
            results.append(hvd.allgather(given, name="large"))
        for turn, result in enumerate(results):
            assert (result.reshape(2, -1) == [[turn], [turn + 0.5]]).all()

    run_ranks(2, main)
    gc.collect()
    assert (result_memory.kept_bytes > 0) == (limit > 0)
    result_memory.release()


def test_the_numpy_adapter_gives_shape_and_dtype() -> None:
    result_memory.keep(LIMIT)
    try:
        array = NumpyAdapter().empty_like(np.ones(1, np.complex64), (3, 1 << 19))
        assert array.shape == (3, 1 << 19)
        assert array.dtype == np.complex64
        assert array.flags.writeable and array.flags.c_contiguous
    finally:
        result_memory.keep(0)


def test_init_sets_the_limit_and_shutdown_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HVDLITE_RESULT_MEMORY", str(LIMIT))
    hvd.init()
    try:
        for _ in range(2):
            assert (hvd.allgather(np.ones(LEAST_BYTES)) == 1).all()
        hvd.allgather(np.ones(1))  # the engine holds the last entry until the next one
        assert 0 < result_memory.kept_bytes <= result_memory.limit_bytes == LIMIT
        alive = hvd.allgather(np.ones(LEAST_BYTES))
    finally:
        hvd.shutdown()
    assert result_memory.kept_bytes == 0
    assert (alive == 1).all()
    del alive
    assert result_memory.kept_bytes == 0
