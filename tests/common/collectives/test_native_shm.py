"""The compiled allreduce of one host: the same bits as Python's, and never a condition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.native import collectives as native
from hvdlite.common.collectives.native import library as native_library
from hvdlite.common.collectives.native.cache import BuildError
from hvdlite.common.collectives.native.library import Library, library
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import InProcessWorld
from tests import ranks
from tests.backends import all_members, quiet, run_on_transports

SUM = Reduction(ReduceOp.SUM)
FLOATS = ("float32", "float64", "float16", "bfloat16")
pytestmark = pytest.mark.timeout(240)


def found() -> Library:
    """The library, where there is a compiler."""
    try:
        library("on")
    except BuildError as error:
        pytest.skip(str(error))
    result = library("on")
    assert result is not None
    return result


def reduced(
    parts: Sequence[Sequence[Array]],
    with_library: Sequence[bool],
    reduction: Reduction = SUM,
    in_place: bool = True,
) -> list[list[Array]]:
    """The segment of each rank, reduced by ranks that have the library or not."""
    found_here = found()

    def program(transport: Transport) -> list[Array]:
        backend = ShmBackend(transport, found_here if with_library[transport.rank] else None)
        inputs = [part.copy() for part in parts[transport.rank]]
        outputs = inputs if in_place else [np.empty_like(part) for part in inputs]
        backend.allreduce(all_members(transport), inputs, outputs, reduction, quiet)
        if not in_place:
            for given, original in zip(inputs, parts[transport.rank], strict=True):
                assert given.tobytes() == original.tobytes()
        return outputs

    results: list[list[Array]] = run_on_transports(Topology.single_host(len(parts)), program)
    return results


def noise(seed: int, sizes: Sequence[int], dtype: str) -> list[Array]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(size).astype(numpy_dtype(dtype)) for size in sizes]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("ranks", "in_place"), [(2, True), (3, False), (8, True)])
def test_the_same_bits_as_python(
    ranks: int, in_place: bool, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PIECE_BYTES", 8 << 10)
    elements = native.PIECE_BYTES // numpy_dtype(dtype).itemsize
    for sizes in ([1], [3, 0, 700, 1], [elements + 1], [5, 3 * native.SLOTS * elements, 1, 1, 77]):
        parts = [noise(rank, sizes, dtype) for rank in range(ranks)]
        reduction = Reduction(ReduceOp.SUM, 0.7, 1 / ranks)
        compiled = reduced(parts, [True] * ranks, reduction, in_place)
        python = reduced(parts, [False] * ranks, reduction)
        for rank in range(ranks):
            for mine, expected in zip(compiled[rank], python[0], strict=True):
                assert mine.tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("ranks", "stretch"), [(2, 2), (3, 1 << 16)], ids=["few", "together"])
def test_every_16_bit_number(dtype: str, ranks: int, stretch: int) -> None:
    numbers = np.arange(1 << 16, dtype=np.uint16).view(numpy_dtype(dtype))
    zeros = np.full(numbers.shape, -0.0, numbers.dtype)  # the neutral element, also for -0
    parts = [[*np.split(each, numbers.size // stretch)] for each in (numbers, *[zeros] * ranks)]
    result = np.concatenate(reduced(parts[:ranks], [True] * ranks)[0])
    known = ~np.isnan(numbers.astype(np.float32))
    assert (result.view(np.uint16)[known] == numbers.view(np.uint16)[known]).all()
    assert np.isnan(result[~known].astype(np.float32)).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("stretch", [7, 7 * 4096], ids=["short", "long"])
def test_16_bit_sums_are_rounded_once_to_nearest(dtype: str, stretch: int) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (2, 7 * 4096), dtype=np.uint16)
    first, second = bits.view(numpy_dtype(dtype))
    parts = [[*np.split(each, each.size // stretch)] for each in (first, second)]
    scale = np.float32(1 / 3)  # so that every way to round occurs, also to subnormal numbers
    result = np.concatenate(reduced(parts, [True] * 2, Reduction(ReduceOp.SUM, 1, 1 / 3))[1])
    with np.errstate(all="ignore"):
        wide = (first.astype(np.float32) + second.astype(np.float32)) * scale
        expected = wide.astype(first.dtype)
    known = ~np.isnan(wide)
    assert known.any() and not known.all()
    assert (result.view(np.uint16)[known] == expected.view(np.uint16)[known]).all()
    assert np.isnan(result[~known].astype(np.float32)).all()


@pytest.mark.parametrize("without", [0, 1, 2])
def test_a_rank_without_the_library_is_no_hindrance(without: int) -> None:
    parts = [noise(rank, [10, 100_000], "float32") for rank in range(3)]
    results = reduced(parts, [rank != without for rank in range(3)])
    for rank in range(3):
        for number, mine in enumerate(results[rank]):
            expected = (parts[0][number] + parts[1][number]) + parts[2][number]
            assert mine.tobytes() == expected.tobytes()


def test_overlapping_groups_take_turns() -> None:
    here, lot = found(), random.Random(1)
    groups = [(0, 1, 2), (0, 1), (1, 2), (0, 2)]
    turns = [(lot.choice(groups), lot.choice([1, 5000, 3_000_000])) for _ in range(60)]

    def program(transport: Transport) -> None:
        backend = ShmBackend(transport, here)
        for number, (members, size) in enumerate(turns):
            if transport.rank not in members:
                continue
            topology = transport.topology.restrict(members)
            group = Members(members, members.index(transport.rank), topology)
            array = np.full(size, number + 10.0**transport.rank, np.float32)
            backend.allreduce(group, [array], [array], SUM, quiet)
            expected = len(members) * number + sum(10.0**rank for rank in members)
            assert (array == expected).all(), (number, members, size, array[0], expected)

    run_on_transports(Topology.single_host(3), program)


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native_library._load.cache_clear()
    yield tmp_path
    native_library._load.cache_clear()


def test_without_a_compiler_python_reduces(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert library("auto") is None
    assert library("off") is None
    with pytest.raises(BuildError, match=r"there is no \$CXX \(/nowhere/c\+\+\) here"):
        library("on")


def test_a_cache_of_no_use_ends_no_rank(empty_cache: Path) -> None:
    (empty_cache / "hvdlite").write_text("this is no directory")

    def main(rank: int) -> list[float]:
        return hvd.allreduce(np.ones(3), op=hvd.Sum, name="x").tolist()

    assert ranks.run_ranks(2, main) == [[2.0] * 3] * 2


def test_a_rank_that_cannot_have_what_it_must_have_closes_its_connections(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    world = InProcessWorld(Topology.single_host(2))
    transport = world.transport(1)
    with pytest.raises(BuildError, match="there is no"):
        Runtime(transport, Config(native="on"))
    assert world.transport(0).gone(1)
