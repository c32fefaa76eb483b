"""Reduce to one rank, reductions of bits, and targets of the wrong size."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.process_group_calls import reduce as reduce_to_one
from hvdlite.common.api.process_group_calls import reduce_async
from hvdlite.common.api.submit import Operation, submit
from hvdlite.common.base.errors import UnsupportedError
from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.formed_sets import form_process_set
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.numpy_adapter import NumpyAdapter
from tests.backends import BITS, DTYPES, compare, oracle, reductions_of, values
from tests.ranks import run_ranks
from tests.worlds import IN_PROCESS, TCP

pytestmark = pytest.mark.timeout(120)

ADAPTER = NumpyAdapter()
WAYS = {
    "compiled": (None, Config()),
    "python": (None, Config(native="off")),
    "ring over hosts": ([[0, 2], [1], [3]], Config(data_plane="ring")),
    "hosts": ([[0, 1], [2, 3]], Config()),
    "uneven hosts, python": ([[0, 2], [1], [3]], Config(native="off")),
    "ranks on hosts": ([[0], [1], [2], [3]], Config()),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_root_gets_the_reduction_and_the_others_keep_what_they_have(way: str) -> None:
    hosts, config = WAYS[way]

    def main(rank: int) -> None:
        for number, dtype in enumerate(DTYPES):
            for step, reduction in enumerate(reductions_of(dtype)):
                root, size = (number + step) % 4, (0, 1, 5, 1001)[step % 4]
                parts = [values(10 * number + each, size, dtype) for each in range(4)]
                call = partial(
                    reduce_to_one,
                    in_place=bool(step % 2),
                    root_rank=root,
                    name=f"{dtype}.{step}",
                    op=reduction.reduce_op,
                    prescale_factor=reduction.prescale,
                    postscale_factor=reduction.postscale,
                )
                given = parts[rank].copy()
                result = call(given)
                if rank == root:
                    compare([result], [oracle(parts, reduction)])
                    assert (result is given) == bool(step % 2)
                else:
                    assert result is (given if step % 2 else None)
                if rank != root or not step % 2:
                    compare([given], [parts[rank]])

    run_ranks(4, main, hosts=hosts, config=config)


@pytest.mark.parametrize("transport", [IN_PROCESS, TCP])
def test_large_tensors_together_in_sets_and_while_a_rank_has_joined(transport: str) -> None:
    def main(rank: int) -> None:
        pair = form_process_set([1, 2]) if rank else None
        sizes = [300_000, 7, 90_001]
        given = [np.arange(n) * (rank + 1) for n in sizes]
        started = [reduce_async(x, 2, f"{x.size}", hvd.Sum, in_place=True) for x in given]
        for operation, tensor in zip(started, given, strict=True):
            assert operation.wait() is tensor
            times = 6 if rank == 2 else rank + 1
            np.testing.assert_array_equal(tensor, np.arange(tensor.size) * times)
        if pair is not None:
            total = reduce_to_one(np.full(3, rank), 1, process_set=pair, op=hvd.Sum)
            assert (total is None) == (rank == 2)
            assert total is None or total.tolist() == [3, 3, 3]
        if rank == 0:
            hvd.join()
            return
        total = reduce_to_one(np.full(2, 8), 1, op=ReduceOp.BAND, name="without rank 0")
        assert total is None if rank == 2 else total.tolist() == [8, 8]
        with pytest.raises(hvd.HorovodInternalError, match="root rank 0 has joined and takes no"):
            reduce_to_one(np.ones(2), 0, name="for rank 0")
        hvd.join()

    run_ranks(3, main, transport=transport, config=Config(stall_check_disable=True))


def test_ranks_that_disagree_on_the_root_are_named() -> None:
    def main(rank: int) -> None:
        words = "reduce 'reduce.x': ranks disagree on root rank: rank 0 has 0, rank 1 has 1"
        with pytest.raises(hvd.HorovodInternalError, match=words):
            reduce_to_one(np.ones(1), rank, name="x")
        with pytest.raises(ValueError, match="invalid root rank 2"):
            reduce_to_one(np.ones(1), 2, name="x")
        with pytest.raises(UnsupportedError, match="reduce has no Adasum"):
            reduce_to_one(np.ones(1), 0, name="x", op=hvd.Adasum)

    run_ranks(2, main)


# -- bits


def every_bit(rank: int, dtype: str, size: int = 1000) -> Any:
    """Integers of every size, or bools."""
    generator = np.random.default_rng(rank)
    if dtype == "bool":
        return generator.random(size) < 0.7
    limits = np.iinfo(dtype)
    return generator.integers(limits.min, limits.max, size, dtype, endpoint=True)


@pytest.mark.parametrize("way", WAYS)
def test_bits_are_combined_as_numpy_does(way: str) -> None:
    hosts, config = WAYS[way]
    dtypes = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "bool"]

    def main(rank: int) -> None:
        for dtype in dtypes:
            parts = [every_bit(each, dtype) for each in range(4)]
            for op, ufunc in BITS.items():
                expected = reduce(ufunc, parts)
                for blocking in (True, False):
                    name = f"{dtype}.{op.name}.{blocking}"
                    if blocking:  # a short call, where there are any
                        result = hvd.allreduce(parts[rank], op=op, name=name)
                    else:
                        handle = hvd.allreduce_async(parts[rank], op=op, name=name)
                        scattered = hvd.reducescatter(parts[rank], op=op, name=name)
                        np.testing.assert_array_equal(
                            scattered, np.split(expected, 4)[rank], strict=True
                        )
                        result = hvd.synchronize(handle)
                    np.testing.assert_array_equal(result, expected, strict=True)

    run_ranks(4, main, hosts=hosts, config=config)


@pytest.mark.parametrize("op", BITS)
def test_a_joined_rank_changes_no_bit(op: ReduceOp) -> None:
    def main(rank: int) -> None:
        if rank < 2:
            for dtype in ("int8", "uint64", "bool"):
                parts = [every_bit(each, dtype) for each in range(2)]
                result = hvd.allreduce(parts[rank], op=op, name=dtype)
                np.testing.assert_array_equal(result, BITS[op](*parts), strict=True)
        hvd.join()

    run_ranks(3, main)


@pytest.mark.parametrize("op", BITS)
def test_bits_of_floats_and_scaled_bits_are_refused_at_the_call(op: ReduceOp) -> None:
    def main(rank: int) -> None:
        for dtype in ("float16", "float32", "float64", "complex64"):
            for call in (hvd.allreduce, hvd.reducescatter):
                words = rf"'\w+.x': {op.name} of {dtype} has no meaning"
                with pytest.raises(ValueError, match=words):
                    call(np.ones(4, dtype), op=op, name="x")
        for factor in ({"prescale_factor": 2.0}, {"postscale_factor": 0.5}):
            with pytest.raises(ValueError, match=f"{op.name} is not scaled"):
                hvd.allreduce(np.ones(4, int), op=op, name="x", **factor)

    run_ranks(1, main)


# -- targets


def into(collective: str, tensor: Any, target: Any, name: str, **options: Any) -> Operation[Any]:
    """Start a collective that writes to `target`, as process groups do."""
    call = CallOptions(**{"process_set": global_process_set, "reduce_op": ReduceOp.SUM, **options})
    entries = submit(current(), ADAPTER, collective, name, [tensor], call, [target])
    return Operation(entries)


def result_size(collective: str, elements: int, rank: int, ranks: int) -> int:
    """How many elements a rank gets where all give so many."""
    if collective == "reducescatter":
        return split_rows(elements, ranks)[rank]
    return elements * ranks if collective == "allgather" else elements


CASES = ["allreduce", "broadcast", "reducescatter", "allgather", "alltoall", "reduce"]


@pytest.mark.parametrize("hosts", [None, [[0], [1, 2]]])
@pytest.mark.parametrize("collective", CASES)
def test_a_target_of_the_right_size_gets_the_result(collective: str, hosts: Any) -> None:
    def main(rank: int) -> None:
        options = {"root_rank": 1} if collective in ("broadcast", "reduce") else {}
        size = result_size(collective, 6, rank, 3)
        for target in (np.zeros(size), np.zeros((size, 2))[:, 0], np.zeros((1, size))):
            given = np.arange(6.0) + rank
            result = into(collective, given, target, "x", **options).wait()
            assert result[0] is target
            flat = target.reshape(-1)
            if collective in ("allreduce", "reducescatter") or (collective, rank) == ("reduce", 1):
                expected = 3 * np.arange(6.0) + 3
                if collective == "reducescatter":
                    expected = expected[2 * rank : 2 * rank + 2]
            elif collective == "reduce":
                expected = np.zeros(6)
            elif collective == "broadcast":
                expected = np.arange(6.0) + 1
            elif collective == "allgather":
                expected = np.concatenate([np.arange(6.0) + each for each in range(3)])
            else:
                own = np.arange(2.0) + 2 * rank
                expected = np.concatenate([own + each for each in range(3)])
            assert flat.tolist() == expected.tolist()

    run_ranks(3, main, hosts=hosts)


@pytest.mark.parametrize("collective", CASES)
def test_a_target_of_the_wrong_size_is_refused_and_the_job_goes_on(collective: str) -> None:
    """At the call where this rank can see it, else when the result is there, on this rank alone."""

    def main(rank: int) -> None:
        options = {"root_rank": 1} if collective in ("broadcast", "reduce") else {}
        given, size = np.ones((6, 2)), result_size(collective, 6, rank, 3)
        decided_by_others = collective in ("allgather", "alltoall")
        for number, wrong in enumerate((size - 1, size + 1, 0)):
            name, target = f"{collective} {number}", np.full((wrong, 2), 7.0)
            has, needs = rf"{2 * wrong}\b", rf"{2 * size}\b"
            if not decided_by_others:
                with pytest.raises(ValueError, match=f"'{name}': the target .*{has}.*{needs}"):
                    into(collective, given, target, name, **options)
                continue
            right = rank != number  # the others have what they wanted
            operation = into(
                collective, given, np.zeros((size, 2)) if right else target, name, **options
            )
            if right:
                assert operation.wait()[0].tolist() == np.ones((size, 2)).tolist()
                continue
            with pytest.raises(hvd.HorovodInternalError, match=f"'{name}': .*{has}.*{needs}") as e:
                operation.wait()
            assert e.value.job_goes_on
            assert (target == 7).all()
        with pytest.raises(ValueError, match="of float32, and the result is of float64"):
            into(collective, given, np.zeros((size, 2), "f"), "dtype", **options)
        if decided_by_others:
            with pytest.raises(ValueError, match="11 elements, and the result has rows of 2"):
                into(collective, given, np.zeros(11), "rows", **options)
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, name="after").tolist() == [3]

    run_ranks(3, main)


def test_targets_of_a_group_are_checked_as_well() -> None:
    def main(rank: int) -> None:
        tensors = [np.ones(3), np.ones(4)]
        options = CallOptions(global_process_set, ReduceOp.SUM, grouped=True)
        with pytest.raises(ValueError, match=r"'g': the target has the shape \[5\], which is 5"):
            submit(current(), ADAPTER, "allreduce", "g", tensors, options, [np.ones(3), np.ones(5)])
        targets = [np.zeros(3), np.zeros(4)]
        for _ in range(2):
            entries = submit(current(), ADAPTER, "allreduce", "g", tensors, options, targets)
            assert [each.tolist() for each in Operation(entries).wait()] == [[2] * 3, [2] * 4]

    run_ranks(2, main)
