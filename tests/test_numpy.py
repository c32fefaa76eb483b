"""hvdlite.numpy: every verb x dtype x op x form against numpy, and what bad input gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import hvdlite.numpy as hvd
from hvdlite.common.requests.handles import HandleTable
from tests.ranks import run_ranks

FLOATS = ["float16", "bfloat16", "float32", "float64"]
COMPLEX = ["complex64", "complex128"]
INTEGERS = ["uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"]
DTYPES = ["bool", *INTEGERS, *FLOATS, *COMPLEX]
OPS = {
    "Sum": hvd.Sum,
    "Average": hvd.Average,
    "Min": hvd.Min,
    "Max": hvd.Max,
    "Product": hvd.Product,
}


def dtype_of(name: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(rank: int, dtype: str, shape: tuple[int, ...] = (3, 5)) -> Any:
    """Small whole numbers, of which every dtype holds sums and products exactly."""
    return np.random.default_rng([rank, 7]).integers(0, 4, shape).astype(dtype_of(dtype))


def oracle(inputs: list[Any], op: str) -> Any:
    """What the ranks' inputs become."""
    dtype = inputs[0].dtype
    if dtype.kind == "b":
        reduce = {"Sum": np.any, "Max": np.any, "Product": np.all, "Min": np.all}[op]
        return reduce(inputs, axis=0)
    wide = [each.astype("complex128" if dtype.kind == "c" else "float64") for each in inputs]
    reduce = {"Sum": sum, "Average": np.mean, "Min": np.min, "Max": np.max, "Product": np.prod}[op]
    result = reduce(wide) if op == "Sum" else reduce(wide, axis=0)
    return (np.trunc(result) if dtype.kind in "iu" else result).astype(dtype)


def assert_close(result: Any, expected: Any, rtol: float) -> None:
    """Compared as complex128: not every numpy takes bfloat16 beside a number of Python."""
    np.testing.assert_allclose(result.astype(complex), expected.astype(complex), rtol=rtol)


def has_meaning(dtype: str, op: str) -> bool:
    if dtype in COMPLEX:
        return op not in ("Min", "Max")
    return (dtype, op) != ("bool", "Average")


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_reductions_of_every_dtype_in_every_form(size: int, op: str) -> None:
    forms: dict[str, Callable[[Any, str], Any]] = {
        "sync": lambda x, n: hvd.allreduce(x, name=n, op=OPS[op]),
        "async": lambda x, n: hvd.synchronize(hvd.allreduce_async(x, name=n, op=OPS[op])),
        "in place": lambda x, n: hvd.allreduce_(x.copy(), name=n, op=OPS[op]),
        "async in place": lambda x, n: hvd.synchronize(
            hvd.allreduce_async_(x.copy(), name=n, op=OPS[op])
        ),
        "grouped": lambda x, n: hvd.grouped_allreduce([x, x], name=n, op=OPS[op])[1],
        "grouped in place": lambda x, n: hvd.grouped_allreduce_(
            [x.copy(), x.copy()], name=n, op=OPS[op]
        )[1],
    }

    def main(rank: int) -> None:
        for dtype in DTYPES:
            if not has_meaning(dtype, op):
                with pytest.raises(ValueError, match="has no meaning"):
                    hvd.allreduce(values(rank, dtype), op=OPS[op], name=f"{dtype}.none")
                continue
            expected = oracle([values(each, dtype) for each in range(size)], op)
            for form, call in forms.items():
                result = call(values(rank, dtype), f"{dtype}.{form}")
                assert result.dtype == dtype_of(dtype) and result.shape == (3, 5)
                assert_close(result, expected, rtol=1e-2 if "16" in dtype else 1e-6)
            rows = hvd.reducescatter(values(rank, dtype), op=OPS[op], name=f"{dtype}.scatter")
            own = np.array_split(expected, size)[rank]
            assert_close(rows, own, rtol=1e-2 if "16" in dtype else 1e-6)

    run_ranks(size, main)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_moves_of_every_dtype(size: int) -> None:
    def main(rank: int) -> None:
        for dtype in DTYPES:
            rows = hvd.allgather(values(rank, dtype, (rank, 2)), name=f"{dtype}.rows")
            expected = [values(each, dtype, (each, 2)) for each in range(size)]
            np.testing.assert_array_equal(rows, np.concatenate(expected))
            root = hvd.broadcast(values(rank, dtype), size - 1, name=f"{dtype}.root")
            np.testing.assert_array_equal(root, values(size - 1, dtype))
            array = values(rank, dtype)
            assert hvd.broadcast_(array, 0, name=f"{dtype}.in") is array
            np.testing.assert_array_equal(array, values(0, dtype))
            sent = hvd.alltoall(values(rank, dtype, (size, 2)), name=f"{dtype}.all")
            expected = [values(each, dtype, (size, 2))[rank] for each in range(size)]
            np.testing.assert_array_equal(sent, np.stack(expected))

    run_ranks(size, main)


def test_sixteen_bit_sums_on_one_host_round_once() -> None:
    """Of 1, and a quarter of the last bit of 1 on seven more ranks, nothing may get lost."""
    size = 8

    def main(rank: int) -> None:
        for dtype, last_bit in (("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
            value = 1.0 if rank == 0 else last_bit / 4
            array = np.full(1000, value, dtype_of(dtype))
            total = hvd.allreduce(array, op=hvd.Sum, name=dtype)
            exact = np.float32(1 + 7 * last_bit / 4).astype(dtype_of(dtype))
            assert exact > 1 and (total == exact).all()

    run_ranks(size, main)


def test_sixteen_bit_sums_round_once_on_each_host() -> None:
    """What the ranks of one host add keeps all bits: each of two hosts brings half a last bit."""
    hosts = [[0, 1, 2, 3], [4, 5, 6, 7]]

    def main(rank: int) -> None:
        for dtype, last_bit in (("float16", 2.0**-10), ("bfloat16", 2.0**-7)):
            value = 1.0 if rank % 4 == 0 else last_bit / 4
            array = np.full(1000, value, dtype_of(dtype))
            total = hvd.allreduce(array, op=hvd.Sum, name=dtype)
            hosts_sum = np.float32(1 + 3 * last_bit / 4)
            sent = hosts_sum.astype(dtype_of(dtype)).astype(np.float32)  # rounded on the wire
            assert (total == (sent + hosts_sum).astype(dtype_of(dtype))).all()
            assert (total > 2).all()

    run_ranks(8, main, hosts=hosts)


def test_scale_factors() -> None:
    def main(rank: int) -> None:
        scales = {"prescale_factor": 0.5, "postscale_factor": 3.0}
        floats = hvd.allreduce(np.full(2, rank + 1.0), name="f", op=hvd.Sum, **scales)
        assert floats.tolist() == [4.5, 4.5]
        # Integers are scaled in float64 and truncated toward zero, before and after the sum.
        whole = hvd.allreduce(np.full(2, -3 - 2 * rank), name="i", op=hvd.Sum, **scales)
        assert whole.tolist() == [-9, -9]
        assert hvd.allreduce(np.full(2, -3 - rank), name="a").tolist() == [-3, -3]

    run_ranks(2, main)


@pytest.mark.parametrize("size", [2, 3, 5])
@pytest.mark.parametrize("dtype", FLOATS)
def test_adasum_of_any_number_of_ranks(size: int, dtype: str) -> None:
    """Orthogonal vectors add up; equal vectors are averaged."""

    def main(rank: int) -> None:
        own = np.zeros(size, dtype_of(dtype))
        own[rank] = rank + 1
        result = hvd.allreduce(own, op=hvd.Adasum, name="orthogonal")
        assert_close(result, np.arange(1, size + 1), rtol=1e-2)
        same = np.arange(4).astype(dtype_of(dtype))
        assert_close(hvd.allreduce(same, op=hvd.Adasum, name="same"), same, rtol=1e-2)
        pair = hvd.add_process_set([0, size - 1]) if size > 2 else hvd.global_process_set
        if pair.included():
            result = hvd.allreduce(own, op=hvd.Adasum, name="pair", process_set=pair)
            assert float(result.astype("float64").sum()) == pytest.approx(1 + size)

    run_ranks(size, main)


def test_arrays_that_are_not_aligned() -> None:
    def main(rank: int) -> None:
        memory = np.zeros(8 * 100 + 1, np.uint8)
        array = memory[1:].view(np.float64)
        assert not array.flags.aligned
        array[:] = rank + 1
        np.testing.assert_array_equal(
            hvd.allreduce(array, op=hvd.Sum, name="new"), np.full(100, 3.0)
        )
        assert hvd.allreduce_(array, op=hvd.Sum, name="in place") is array
        np.testing.assert_array_equal(array, np.full(100, 3.0))

    run_ranks(2, main)


def test_arrays_that_are_not_contiguous_numbers_and_lists() -> None:
    def main(rank: int) -> None:
        base = np.arange(12.0).reshape(3, 4) + rank
        view = base.T[::2]
        assert hvd.allreduce_(view, name="in", op=hvd.Sum) is view
        expected = np.arange(12.0).reshape(3, 4) + rank
        expected.T[::2] = 2 * np.arange(12.0).reshape(3, 4).T[::2] + 1
        np.testing.assert_array_equal(base, expected)
        assert hvd.allreduce(base[:, ::2], name="out", op=hvd.Sum).shape == (3, 2)
        assert hvd.allreduce(rank + 1, name="number", op=hvd.Sum) == 3
        assert hvd.allreduce([1.0, rank], name="list", op=hvd.Sum).tolist() == [2.0, 1.0]
        with pytest.raises(ValueError, match="only a numpy array can be written in place"):
            hvd.allreduce_([1.0], name="list")
        fixed = np.zeros(2)
        fixed.flags.writeable = False
        with pytest.raises(ValueError, match="not a read-only one"):
            hvd.allreduce_(fixed, name="fixed")
        with pytest.raises(ValueError, match="order of another machine"):
            hvd.allreduce(np.zeros(2, ">f4"), name="foreign")
        empty = hvd.allreduce(np.zeros((0, 3)), name="empty")
        assert empty.shape == (0, 3)

    run_ranks(2, main)


def test_alltoall_with_splits() -> None:
    def main(rank: int) -> None:
        array = np.arange(6).reshape(6, 1) + 10 * rank
        splits = [[1, 2, 0], [0, 0, 0], [3, 0, 3]][rank]
        handle = hvd.alltoall_async(array, splits, name="a")
        output, received = hvd.synchronize(handle)
        assert received.dtype == np.int32
        expected = [[0, 20, 21, 22], [1, 2], [23, 24, 25]][rank]
        assert output[:, 0].tolist() == expected
        assert received.tolist() == [[1, 0, 3], [2, 0, 0], [0, 0, 3]][rank]
        wide = np.array(splits, np.int64)
        assert hvd.alltoall(array, wide, name="b")[1].dtype == np.int64
        no_columns, received = hvd.alltoall(np.zeros((6, 0)), splits, name="c")
        assert no_columns.shape == (len(expected), 0)

    run_ranks(3, main)


WRONG_CALLS: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: hvd.allreduce(np.array(["a"])), "Tensor type .* is not supported"),
    "long double": (lambda: hvd.allreduce(np.zeros(1, np.longdouble)), "is not supported"),
    "Min of complex": (
        lambda: hvd.allreduce(np.zeros(1, "complex64"), op=hvd.Min),
        "Min of complex64 has no meaning",
    ),
    "Adasum of integers": (
        lambda: hvd.allreduce(np.zeros(1, int), op=hvd.Adasum),
        "Adasum needs a floating-point tensor",
    ),
    "Adasum scatter": (
        lambda: hvd.reducescatter(np.zeros(1), op=hvd.Adasum),
        "reducescatter has no Adasum",
    ),
    "op": (lambda: hvd.allreduce(np.zeros(1), op=17), "op=17 is none of Average"),
    "average and op": (
        lambda: hvd.allreduce(np.zeros(1), average=True, op=hvd.Sum),
        "op parameter supersedes average",
    ),
    "NaN": (
        lambda: hvd.allreduce(np.zeros(1), prescale_factor=float("nan")),
        "nan is no scale factor",
    ),
    "root": (lambda: hvd.broadcast(np.zeros(1), 2), r"invalid root rank 2.*\[0, 1\]"),
    "scalar": (lambda: hvd.reducescatter(np.float32(1)), "does not support scalar inputs"),
    "set": (
        lambda: hvd.allreduce(np.zeros(1), process_set=hvd.ProcessSet([0])),
        "Process set provided does not exist",
    ),
    "set of join": (lambda: hvd.join(process_set=hvd.ProcessSet([0])), "does not exist"),
    "rows": (lambda: hvd.alltoall(np.zeros(3)), "3 rows for 2 ranks"),
    "number of splits": (lambda: hvd.alltoall(np.zeros(3), [3]), "1 splits for 2 ranks"),
    "sum of splits": (lambda: hvd.alltoall(np.zeros(3), [2, 2]), "beyond 3 rows"),
    "negative splits": (lambda: hvd.alltoall(np.zeros(3), [-1, 2]), "must not be negative"),
    "shape of splits": (lambda: hvd.alltoall(np.zeros(3), [[1, 2]]), "must be 1-dimensional"),
    "dtype of splits": (lambda: hvd.alltoall(np.zeros(3), [0.5, 1.0]), "must be integers"),
}


@pytest.mark.parametrize("form", ["reducescatter", "reducescatter_async"])
@pytest.mark.parametrize("kind", [ValueError, RuntimeError, NotImplementedError])
def test_an_adasum_of_parts_is_refused_by_an_error_of_every_kind(
    form: str, kind: type[Exception]
) -> None:
    def main(rank: int) -> None:
        with pytest.raises(kind, match="reducescatter has no Adasum"):
            getattr(hvd, form)(np.zeros(2), op=hvd.Adasum)
        with pytest.raises(kind, match="reducescatter has no Adasum"):
            getattr(hvd, f"grouped_{form}")([np.zeros(2)], op=hvd.Adasum)

    run_ranks(1, main)


def test_what_is_wrong_on_one_rank_is_refused_at_the_call() -> None:
    def main(rank: int) -> None:
        for call, words in WRONG_CALLS.values():
            with pytest.raises(ValueError, match=words):
                call()
        with pytest.warns(DeprecationWarning, match="average= is deprecated"):
            assert hvd.allreduce(np.ones(1), average=False, name="old").tolist() == [2.0]
        for scalar in (hvd.allgather, hvd.alltoall):
            with pytest.raises(hvd.HorovodInternalError, match="without dimensions"):
                scalar(np.float32(1), name="scalar")

    run_ranks(2, main)


def test_only_asynchronous_forms_have_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[Any] = []
    add = HandleTable.add

    def count(table: HandleTable, operation: Any) -> int:
        added.append(operation)
        return add(table, operation)

    monkeypatch.setattr(HandleTable, "add", count)

    def main(rank: int) -> None:
        x = np.ones(2)
        for form in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.reducescatter, hvd.alltoall):
            form(x)
        hvd.grouped_allreduce([x])
        hvd.grouped_allreduce_([x])
        hvd.broadcast(x, 0)
        hvd.broadcast_(x, 0)
        hvd.barrier()
        assert not added
        hvd.synchronize(hvd.allreduce_async(x))
        assert len(added) == 1

    run_ranks(1, main)


def test_barriers_wait_for_those_of_other_ranks() -> None:
    arrived: list[int] = []

    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        for round_ in range(3):
            if rank == 1:
                hvd.barrier()
                assert len(arrived) == 2 * (round_ + 1)
            else:
                hvd.barrier(process_set=pair)
                arrived.append(rank)
                hvd.barrier()
            hvd.barrier()

    run_ranks(3, main)


def test_barriers_after_a_join_before_which_ranks_made_different_numbers_of_them() -> None:
    arrived: list[int] = []

    def main(rank: int) -> None:
        for _ in range(2):
            for _ in range(rank):
                hvd.barrier()
            hvd.join()
        if rank:
            arrived.append(rank)
        hvd.barrier()
        assert sorted(arrived) == [1, 2]

    run_ranks(3, main)


def test_before_init() -> None:
    for call in (hvd.rank, hvd.size, hvd.local_rank, hvd.cross_size, hvd.mpi_enabled):
        with pytest.raises(ValueError, match=r"has not been initialized; use hvd.init\(\)"):
            call()
    for collective in (lambda: hvd.allreduce(np.ones(1)), hvd.barrier, hvd.join):
        with pytest.raises(hvd.HorovodInternalError, match="has not been initialized"):
            collective()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvd.start_timeline("timeline.json")
    assert not hvd.is_initialized()
    hvd.shutdown()


def test_process_sets_say_what_they_are() -> None:
    some = hvd.ProcessSet(reversed(range(3)))
    assert str(some) == "ProcessSet(process_set_id=None, ranks=[0, 1, 2], mpi_comm=None)"
    assert some.rank() is None
    for wrong in ("012", 3, [0.5], [True], ["0"], None):
        with pytest.raises(ValueError, match="process set is made of"):
            hvd.ProcessSet(wrong)
    with pytest.raises(ValueError, match="not been registered"):
        some.size()


def test_a_job_of_one_rank() -> None:
    hvd.init(process_sets="dynamic")
    try:
        assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.cross_rank()) == (0, 1, 1, 0)
        assert hvd.allreduce(np.arange(3), op=hvd.Sum).tolist() == [0, 1, 2]
        assert hvd.join() == 0
        hvd.init()  # again: nothing happens
        with pytest.raises(ValueError, match="Invalid type of argument comm"):
            hvd.shutdown()
            hvd.init(comm="world")
        with pytest.raises(ValueError, match="start it with hvdlite-run"):
            hvd.init(comm=[0, 1])
        hvd.init(comm=[0])
        assert hvd.size() == 1
    finally:
        hvd.shutdown()


def test_a_wrong_setting_is_an_error_at_init_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "often")
    with pytest.raises(ValueError, match="HOROVOD_CYCLE_TIME='often': must be a number"):
        hvd.init()
    assert not hvd.is_initialized()
