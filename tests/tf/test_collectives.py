"""Every collective x dtype x mode of TensorFlow, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from hvdlite.common.base.lists import split_rows
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.tensors.numpy_adapter import aligned_empty
from hvdlite.tf.calls.collective_call import array_of, tensor_of
from tests.ranks import run_ranks

Array = np.ndarray[Any, Any]
DTYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128",
]  # fmt: skip
OPS = ("Sum", "Average", "Min", "Max", "Product")
SHAPES = [(), (0,), (5,), (3, 2)]
Collectives = Callable[[Sequence[Any]], list[Any]]


def values(rank: int, shape: tuple[int, ...], dtype: str, salt: int = 0) -> Array:
    """Small whole numbers, which every dtype holds exactly."""
    rng = np.random.default_rng([rank, salt, *shape])
    return np.asarray(rng.integers(0, 4, shape)).astype(numpy_dtype(dtype))


def wide(array: Array) -> Array:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def reduced(op: str, arrays: list[Array]) -> Array:
    """The oracle of all reductions."""
    reduce: Any = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}.get(op, np.add)
    result = reduce.reduce([wide(array) for array in arrays])
    if op == "Average":
        result = result / len(arrays)
        if arrays[0].dtype.kind in "iu":
            result = np.trunc(result)
    return np.asarray(result).astype(arrays[0].dtype)


def meaningless(op: str, dtype: str) -> bool:
    return (op in ("Min", "Max") and dtype.startswith("complex")) or (
        op == "Average" and dtype == "bool"
    )


def assert_same(result: Any, expected: Array) -> None:
    array = result.numpy() if hasattr(result, "numpy") else np.asarray(result)
    assert array.dtype == expected.dtype
    assert array.shape == expected.shape
    tolerance = 1e-2 if expected.dtype.itemsize == 2 and expected.dtype.kind != "i" else 1e-6
    np.testing.assert_allclose(wide(array), wide(expected), rtol=tolerance)


def eager(function: Collectives, inputs: list[Array]) -> list[Any]:
    return function([tf.constant(each) for each in inputs])


def graph(function: Collectives, inputs: list[Array]) -> list[Any]:
    results: list[Any] = tf.function(function)([tf.constant(each) for each in inputs])
    return results


def unknown_shapes(function: Collectives, inputs: list[Array]) -> list[Any]:
    signature = [tf.TensorSpec(None, tf.as_dtype(each.dtype)) for each in inputs]
    traced = tf.function(lambda *tensors: function(tensors), input_signature=signature)
    results: list[Any] = traced(*map(tf.constant, inputs))
    return results


def branch(function: Collectives, inputs: list[Array]) -> list[Any]:
    @tf.function
    def run(tensors: Any, condition: Any) -> Any:
        return tf.cond(condition, lambda: function(tensors), lambda: function(tensors))

    results: list[Any] = run([tf.constant(each) for each in inputs], tf.constant(True))
    return results


def session(function: Collectives, inputs: list[Array]) -> list[Any]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as running:
        holders = [tf.compat.v1.placeholder(each.dtype) for each in inputs]
        results: list[Any] = running.run(function(holders), dict(zip(holders, inputs, strict=True)))
        return results


MODES = [eager, graph, unknown_shapes, branch, session]
REDUCTIONS = [(dtype, op) for dtype in DTYPES for op in OPS if not meaningless(op, dtype)]


def reductions(mode: Any) -> list[tuple[str, str]]:
    """In a graph by default those of one axis each: what computes is the same as eagerly."""
    chosen = [each for each in REDUCTIONS if each[1] == "Sum" or each[0] in ("int32", "float32")]
    return chosen if mode is graph else REDUCTIONS


# One rank takes the same way through all of them.
CASES = [
    *(pytest.param(mode, 3, id=f"3-{mode.__name__}") for mode in MODES),
    *(pytest.param(mode, 1, id=f"1-{mode.__name__}") for mode in (eager, graph)),
]
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.__name__)
cases = pytest.mark.parametrize(("mode", "size"), CASES)


@cases
def test_allreduce(mode: Any, size: int) -> None:
    # One graph for many cases: to build them takes the time.
    cases = [
        (dtype, op, SHAPES[index % len(SHAPES)])
        for index, (dtype, op) in enumerate(reductions(mode))
    ]

    def main(rank: int) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            return [
                hvd.allreduce(tensor, op=getattr(hvd, op))
                for tensor, (_, op, _) in zip(tensors, cases, strict=True)
            ]

        inputs = [values(rank, shape, dtype) for dtype, _, shape in cases]
        results = mode(function, inputs)
        for result, (dtype, op, shape) in zip(results, cases, strict=True):
            everybodys = [values(each, shape, dtype) for each in range(size)]
            assert_same(result, reduced(op, everybodys))

    run_ranks(size, main)


@cases
def test_the_other_collectives(mode: Any, size: int) -> None:
    dtypes = DTYPES[::3] if mode is graph else DTYPES

    def main(rank: int) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            outputs = []
            for tensor in tensors:
                outputs += [
                    hvd.allgather(tensor),
                    hvd.broadcast(tensor[:0], size - 1),
                    hvd.broadcast(tensor[0], size - 1),
                    *hvd.alltoall(tensor, [1] * size),
                ]
            return outputs

        def rows(each: int, dtype: str) -> Array:
            return values(each, (size + each, 2), dtype)

        results = iter(mode(function, [rows(rank, dtype) for dtype in dtypes]))
        for dtype in dtypes:
            everybodys = [rows(each, dtype) for each in range(size)]
            assert_same(next(results), np.concatenate(everybodys))
            assert_same(next(results), everybodys[-1][:0])
            assert_same(next(results), everybodys[-1][0])
            assert_same(next(results), np.stack([each[rank] for each in everybodys]))
            assert_same(next(results), np.ones(size, np.int32))

    run_ranks(size, main)


@cases
def test_reducescatter(mode: Any, size: int) -> None:
    cases = reductions(mode)

    def main(rank: int) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            return [
                hvd.reducescatter(tensor, op=getattr(hvd, op))
                for tensor, (_, op) in zip(tensors, cases, strict=True)
            ]

        results = mode(function, [values(rank, (4, 2), dtype) for dtype, _ in cases])
        parts = split_rows(4, size)
        own = slice(sum(parts[:rank]), sum(parts[: rank + 1]))
        for result, (dtype, op) in zip(results, cases, strict=True):
            everybodys = [values(each, (4, 2), dtype) for each in range(size)]
            assert_same(result, reduced(op, everybodys)[own])

    run_ranks(size, main)


@modes
def test_grouped_forms(mode: Any) -> None:
    shapes = [(4,), (2, 3), (4, 1)]

    def main(rank: int) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            return [
                *hvd.grouped_allreduce(tensors, op=hvd.Sum),
                *hvd.grouped_allgather(tensors),
                *hvd.grouped_reducescatter(tensors, op=hvd.Sum),
            ]

        results = iter(mode(function, [values(rank, shape, "float32") for shape in shapes]))
        both = [[values(each, shape, "float32") for each in range(2)] for shape in shapes]
        for pair in both:
            assert_same(next(results), pair[0] + pair[1])
        for pair in both:
            assert_same(next(results), np.concatenate(pair))
        for pair in both:
            assert_same(next(results), np.array_split(pair[0] + pair[1], 2)[rank])

    run_ranks(2, main)


@modes
def test_names_given_twice_are_told_apart(mode: Any) -> None:
    def main(rank: int) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            return [hvd.allreduce(tensor, name="same", op=hvd.Sum) for tensor in tensors]

        for result in mode(function, [np.full(n, rank, np.float32) for n in (1, 2, 3)]):
            assert_same(result, np.ones(len(result), np.float32))

    run_ranks(2, main)


@pytest.mark.parametrize("traced", [False, True])
def test_splits_may_be_tensors_and_differ_between_ranks(traced: bool) -> None:
    def main(rank: int) -> None:
        def exchange(tensor: Any, splits: Any) -> Any:
            return hvd.alltoall(tensor, splits)

        call = tf.function(exchange) if traced else exchange
        output, received = call(
            tf.range(3) + 10 * rank, tf.constant([1, 2] if rank == 0 else [3, 0], tf.int32)
        )
        assert output.numpy().tolist() == ([0, 10, 11, 12] if rank == 0 else [1, 2])
        assert received.numpy().tolist() == ([1, 3] if rank == 0 else [2, 0])
        assert received.dtype == tf.int32

    run_ranks(2, main)


def test_a_loop_in_a_graph() -> None:
    def main(rank: int) -> None:
        @tf.function
        def power(x: Any, times: Any) -> Any:
            for _ in tf.range(times):
                x = hvd.allreduce(x, op=hvd.Sum)
            return x

        assert power(tf.constant([1.0, 2.0]), tf.constant(4)).numpy().tolist() == [16.0, 32.0]

    run_ranks(2, main)


def test_a_function_that_is_called_twice_in_a_graph() -> None:
    def main(rank: int) -> None:
        @tf.function
        def total(x: Any) -> Any:
            return hvd.allreduce(x, op=hvd.Sum)

        @tf.function
        def both(x: Any) -> Any:
            return total(x), total(x * 10), hvd.allreduce(x * 100, op=hvd.Sum)

        assert [each.numpy() for each in both(tf.constant(1.0 + rank))] == [3.0, 30.0, 300.0]

    run_ranks(2, main)


@modes
def test_slices_are_gathered(mode: Any) -> None:
    def main(rank: int) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            slices = tf.IndexedSlices(tensors[0], tensors[1], tf.constant([9, 2]))
            total = hvd.allreduce(slices, op=hvd.Sum)
            mean, dense = hvd.grouped_allreduce([slices, tensors[0]], op=hvd.Average)
            return [total.values, total.indices, mean.values, mean.indices, dense]

        inputs = [values(rank, (2, 2), "float32"), np.array([rank, 3])]
        results = mode(function, inputs)
        both = [values(each, (2, 2), "float32") for each in range(2)]
        assert_same(results[0], np.concatenate(both))
        assert_same(results[1], np.array([0, 3, 1, 3]))
        assert_same(results[2], np.concatenate(both) / 2)
        assert_same(results[3], np.array([0, 3, 1, 3]))
        assert_same(results[4], (both[0] + both[1]) / 2)

    run_ranks(2, main)


@modes
def test_the_average_of_slices_is_a_true_division(mode: Any) -> None:
    dtypes = DTYPES[1:] if mode is eager else ["int16", "float16"] if mode is graph else ["int64"]

    def main(rank: int) -> None:
        for dtype in dtypes:
            check(rank, dtype)

    def check(rank: int, dtype: str) -> None:
        def function(tensors: Sequence[Any]) -> list[Any]:
            slices = tf.IndexedSlices(tensors[0], tf.constant([0, 3]), tf.constant([9, 2]))
            alone = hvd.allreduce(slices)
            grouped = hvd.grouped_allreduce([slices, slices])
            mixed = hvd.grouped_allreduce([tensors[0], slices])
            return [alone.values, *(each.values for each in grouped), mixed[1].values, mixed[0]]

        *slices, dense = mode(function, [values(rank, (2, 2), dtype)])
        both = [values(each, (2, 2), dtype) for each in range(2)]
        half = wide(np.concatenate(both)) / 2
        is_integer = both[0].dtype.kind in "iu"
        single = both[0].dtype.itemsize <= 2  # As TensorFlow and Horovod divide integers.
        divided = (np.float32 if single else np.float64) if is_integer else both[0].dtype
        for each in slices:
            assert_same(each, half.astype(divided))
        assert_same(dense, reduced("Average", both))

    run_ranks(2, main)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("form", ["alone", "grouped", "mixed"])
def test_reductions_that_slices_do_not_have(form: str, traced: bool) -> None:
    """They are refused on each rank by itself: nothing is sent before."""

    def main(rank: int) -> None:
        slices = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0]), tf.constant([9, 2]))
        tensors = {"alone": [], "grouped": [slices], "mixed": [tf.ones(3)]}[form]

        def call(**options: Any) -> Any:
            if form == "alone":
                return hvd.allreduce(slices, **options)
            return hvd.grouped_allreduce([*tensors, slices], **options)

        def refuses(kind: type[Exception], words: str, **options: Any) -> None:
            with pytest.raises(kind, match=words):
                (tf.function(call) if traced else call)(**options)

        if rank == 0:
            for op in ("Min", "Max", "Product", "Adasum"):
                refuses(NotImplementedError, f"no {op}", op=getattr(hvd, op))
            refuses(NotImplementedError, "prescale_factor", prescale_factor=2.0)
            slices = tf.cast(slices.values, tf.bool)
            slices = tf.IndexedSlices(slices, tf.constant([0]), tf.constant([9, 2]))
            tensors = [slices] if tensors else []
            refuses(ValueError, "Average of bool has no meaning")

    run_ranks(2, main)


@pytest.mark.parametrize("what", ["shape", "op"])
@modes
def test_slices_that_are_not_alike_are_refused(mode: Any, what: str) -> None:
    """As where each rank has made a vocabulary of its own."""

    def main(rank: int) -> None:
        rows = 40 if what == "shape" and rank else 10
        op = hvd.Average if what == "op" and rank else hvd.Sum

        def function(tensors: Sequence[Any]) -> list[Any]:
            slices = tf.IndexedSlices(tensors[0], tensors[1], tf.constant([rows, 2]))
            reduced = hvd.allreduce(slices, op=op, name="table")
            return [reduced.values, reduced.indices]

        kinds = (hvd.HorovodInternalError, tf.errors.OpError)
        with pytest.raises(kinds, match=r"rank 0 has tf.IndexedSlices of shape \(10, 2\), Sum"):
            mode(function, [values(rank, (1, 2), "float32"), np.array([rows - 1])])

    run_ranks(2, main)


@pytest.mark.parametrize("form", ["reducescatter", "grouped_reducescatter"])
@pytest.mark.parametrize("kind", [ValueError, RuntimeError, tf.errors.InvalidArgumentError])
def test_an_adasum_of_parts_is_refused(form: str, kind: type[Exception]) -> None:
    def main(rank: int) -> None:
        def call() -> Any:
            given = tf.ones(2)
            return getattr(hvd, form)([given] if "grouped" in form else given, op=hvd.Adasum)

        for each in (call, tf.function(call)):
            with pytest.raises(kind, match="reducescatter has no Adasum"):
                each()

    run_ranks(1, main)


NO_SET: dict[str, Callable[[Any], Any]] = {
    "allreduce": lambda s: hvd.allreduce(tf.ones(2), process_set=s),
    "grouped_allreduce": lambda s: hvd.grouped_allreduce([tf.ones(2)], process_set=s),
    "slices": lambda s: hvd.allreduce(
        tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])), op=hvd.Sum, process_set=s
    ),
    "allgather": lambda s: hvd.allgather(tf.ones(2), process_set=s),
    "grouped_allgather": lambda s: hvd.grouped_allgather([tf.ones(2)], process_set=s),
    "broadcast": lambda s: hvd.broadcast(tf.ones(2), 0, process_set=s),
    "alltoall": lambda s: hvd.alltoall(tf.ones(2), process_set=s),
    "reducescatter": lambda s: hvd.reducescatter(tf.ones(2), process_set=s),
    "grouped_reducescatter": lambda s: hvd.grouped_reducescatter([tf.ones(2)], process_set=s),
    "barrier": lambda s: hvd.barrier(process_set=s),
}


@pytest.mark.parametrize("number", [None, 7])
def test_a_process_set_that_does_not_exist(number: int | None) -> None:
    """The call is refused, also the one that builds a graph."""

    def main(rank: int) -> None:
        unknown = hvd.ProcessSet([0, 1])
        unknown.process_set_id = number
        for call in NO_SET.values():
            for where in (nullcontext(), tf.Graph().as_default()):
                with where, pytest.raises(ValueError, match="Process set provided does not exist"):
                    call(unknown)
        hvd.allreduce(tf.ones(2))

    run_ranks(2, main)


@pytest.mark.parametrize("traced", [False, True])
def test_variables_take_the_roots_values(traced: bool) -> None:
    def main(rank: int) -> None:
        variables = [tf.Variable([float(rank), n]) for n in range(3)]

        def send() -> Any:
            return hvd.broadcast_(variables, root_rank=1)

        returned = (tf.function(send) if traced else send)()
        for n, variable in enumerate(variables):
            assert variable.numpy().tolist() == [1.0, n]
            assert returned[n].numpy().tolist() == [1.0, n]

    run_ranks(2, main)


@modes
def test_process_sets(mode: Any) -> None:
    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])

        def function(tensors: Sequence[Any]) -> list[Any]:
            return [hvd.allreduce(tensors[0], op=hvd.Sum, process_set=pair)]

        if rank != 1:
            (result,) = mode(function, [np.array([rank], np.float32)])
            assert_same(result, np.array([2.0], np.float32))
        hvd.barrier()

    run_ranks(3, main)


@modes
def test_questions_are_answered_when_a_graph_is_run(mode: Any) -> None:
    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 1])
        number = pair.process_set_id

        def function(tensors: Sequence[Any]) -> list[Any]:
            return [
                hvd.rank_op(), hvd.size_op(), hvd.local_rank_op(), hvd.local_size_op(),
                hvd.size_op(number), hvd.process_set_included_op(number),
            ]  # fmt: skip

        answers = [int(each) for each in mode(function, [])]
        assert answers == [rank, 3, rank, 3, 2, int(rank < 2)]

    run_ranks(3, main)


@pytest.mark.parametrize("traced", [False, True])
def test_join(traced: bool) -> None:
    def main(rank: int) -> None:
        join = tf.function(hvd.join) if traced else hvd.join
        for _ in range(2 - rank):
            hvd.allreduce(tf.ones(2), op=hvd.Sum, name="while others have joined")
        assert int(join()) == 0

    run_ranks(2, main)


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_function_joins_and_waits_where_it_says_so(
    native: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HVDLITE_TF_NATIVE", native)

    def main(rank: int) -> None:
        @tf.function
        def epoch(steps: Any) -> Any:
            total = tf.constant(0.0)
            for _ in tf.range(steps):
                total += hvd.allreduce(tf.constant(1.0), op=hvd.Sum, name="step")
            alone = hvd.allreduce(tf.constant(1.0), op=hvd.Sum) if rank else 0.0
            last = hvd.join()
            hvd.barrier()
            return total, alone, last, hvd.allreduce(total, op=hvd.Sum, name="after")

        for _ in range(2):
            results = [float(each) for each in epoch(tf.constant(3 + 2 * rank))]
            assert results == ([8, 1, 1, 14] if rank else [6, 0, 1, 14])

    run_ranks(2, main)


def errors_of(mode: Any, function: Collectives, inputs: list[Array]) -> Exception:
    try:
        mode(function, inputs)
    except Exception as error:
        return error
    raise AssertionError("no error")


MISMATCHES: dict[str, tuple[str, Callable[[Any, int], Any]]] = {
    "shape": ("shape", lambda x, rank: hvd.allreduce(tf.zeros([2 + rank]), name="x")),
    "dtype": (
        "data type",
        lambda x, rank: hvd.allreduce(
            tf.zeros(2, tf.int32 if rank else tf.float32), name="x", op=hvd.Sum
        ),
    ),
    "op": (
        "reduction operation",
        lambda x, rank: hvd.allreduce(x, name="x", op=hvd.Sum if rank else hvd.Max),
    ),
    "root": ("root rank", lambda x, rank: hvd.broadcast(x, rank, name="x")),
    "trailing shape": (
        "shape after the first",
        lambda x, rank: hvd.allgather(tf.zeros([1, 2 + rank]), name="x"),
    ),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_ranks_that_disagree(what: str) -> None:
    text, call = MISMATCHES[what]

    def main(rank: int) -> None:
        for mode in (eager, graph, session):
            error = errors_of(mode, lambda t: [call(t[0], rank)], [np.zeros(2, np.float32)])
            assert isinstance(error, tf.errors.FailedPreconditionError), error
            assert all(each in str(error) for each in (text, "rank 0", "rank 1")), error
            assert float(hvd.allreduce(tf.constant(1.0), op=hvd.Sum)) == 2.0  # the job goes on

    run_ranks(2, main)


WRONG: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "splits beyond the rows": ("beyond 2 rows", lambda x: hvd.alltoall(x, [1, 2])),
    "splits of another length": ("3 splits for 2 ranks", lambda x: hvd.alltoall(x, [1, 1, 0])),
    "negative splits": ("negative", lambda x: hvd.alltoall(x, [-1, 1])),
    "a scalar to scatter": ("scalar", lambda x: hvd.reducescatter(x[0])),
    "a foreign root": ("root rank", lambda x: hvd.broadcast(x, 7)),
    "ragged": ("is a RaggedTensor", lambda x: hvd.allgather(tf.ragged.constant([[1], []]))),
    "sparse": ("is a SparseTensor", lambda x: hvd.allreduce(tf.sparse.eye(2))),
    "strings": ("not supported", lambda x: hvd.allreduce(tf.constant(["a"]))),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments(what: str) -> None:
    text, call = WRONG[what]

    def main(rank: int) -> None:
        for mode in (eager, graph, session):
            error = errors_of(mode, lambda t: [call(t[0])], [np.zeros(2, np.float32)])
            assert isinstance(error, tf.errors.InvalidArgumentError), error
            assert text in str(error)

    run_ranks(2, main)


@pytest.mark.parametrize("mode", [eager, graph], ids=lambda mode: mode.__name__)
def test_a_process_set_without_this_rank(mode: Any) -> None:
    def main(rank: int) -> None:
        alone = hvd.add_process_set([0])
        if rank == 1:
            error = errors_of(
                mode, lambda t: [hvd.allreduce(t[0], process_set=alone)], [np.zeros(2, np.float32)]
            )
            assert isinstance(error, tf.errors.InvalidArgumentError)
            assert "not a member" in str(error)
        with pytest.raises(ValueError):
            hvd.allreduce(tf.zeros(2), process_set=hvd.ProcessSet([0, 1]))

    run_ranks(2, main)


def test_a_function_is_not_converted_by_autograph() -> None:
    def main(rank: int) -> None:
        @tf.function(autograph=True)
        def converted(x: Any) -> Any:
            return hvd.allreduce(x) if tf.reduce_sum(x) > 0 else x

        assert converted(tf.ones(2)).numpy().tolist() == [1.0, 1.0]

    run_ranks(1, main)


def test_tensors_are_seen_and_made_without_a_copy() -> None:
    array = aligned_empty((1000,), np.dtype(np.float32))
    tensor = tensor_of(array)
    array[:] = 7
    assert float(tensor[0]) == 7
    # Two copies that live at the same time would have two addresses.
    assert array_of(tensor).ctypes.data == array_of(tensor).ctypes.data == array.ctypes.data
