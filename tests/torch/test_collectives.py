"""Every collective in every form, dtype and number of ranks, against numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.base.lists import split_rows
from hvdlite.torch.dtypes import DTYPE_NAMES
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks

DTYPES = list(DTYPE_NAMES)
OPS = ("Sum", "Average", "Min", "Max", "Product")
Tensor = torch.Tensor


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Small whole numbers, which every dtype holds exactly."""
    rng = np.random.default_rng([rank, salt, *shape])
    return torch.from_numpy(rng.integers(0, 4, shape)).to(dtype)


def wide(tensor: Tensor) -> Any:
    """A numpy array in which arithmetic is exact."""
    if tensor.dtype.is_complex:
        return tensor.to(torch.complex128).numpy()
    return tensor.to(torch.float64).numpy()


def reduced(op: str, tensors: list[Tensor]) -> Tensor:
    """The oracle of all reductions."""
    arrays, dtype = [wide(tensor) for tensor in tensors], tensors[0].dtype
    reduce = {"Min": np.minimum, "Max": np.maximum, "Product": np.multiply}.get(op, np.add)
    result = reduce.reduce(arrays)
    if op == "Average":
        result = result / len(tensors)
        if not (dtype.is_floating_point or dtype.is_complex):
            result = np.trunc(result)
    return torch.from_numpy(np.asarray(result)).to(dtype)


def cases(form: int) -> Iterator[tuple[torch.dtype, str]]:
    """Each dtype with one op that means something, which is another one for the next form."""
    for place, dtype in enumerate(DTYPES):
        without = {"Min", "Max"} if dtype.is_complex else {"Average"} if dtype is torch.bool else {}
        meant = [op for op in OPS if op not in without]
        yield dtype, meant[(place + form) % len(meant)]


def assert_same(result: Tensor, expected: Tensor) -> None:
    assert result.dtype == expected.dtype
    assert result.shape == expected.shape
    tolerance = 1e-2 if result.dtype in (torch.float16, torch.bfloat16) else 1e-6
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=0)


REDUCTIONS: dict[str, Callable[..., list[Tensor]]] = {
    "allreduce": lambda ts, **o: [hvd.allreduce(t, **o) for t in ts],
    "allreduce_async": lambda ts, **o: [
        hvd.synchronize(h) for h in [hvd.allreduce_async(t, **o) for t in ts]
    ],
    "allreduce_": lambda ts, **o: [hvd.allreduce_(t, **o) for t in ts],
    "allreduce_async_": lambda ts, **o: [
        hvd.synchronize(h) for h in [hvd.allreduce_async_(t, **o) for t in ts]
    ],
    "grouped_allreduce": hvd.grouped_allreduce,
    "grouped_allreduce_async": lambda ts, **o: hvd.synchronize(
        hvd.grouped_allreduce_async(ts, **o)
    ),
    "grouped_allreduce_": lambda ts, **o: list(hvd.grouped_allreduce_(ts, **o)),
    "grouped_allreduce_async_": lambda ts, **o: list(
        hvd.synchronize(hvd.grouped_allreduce_async_(ts, **o))
    ),
}
SHAPES = [(), (0,), (1,), (5,), (3, 2), (2, 0, 3)]


@pytest.mark.parametrize("form", REDUCTIONS)
@pytest.mark.parametrize("size", [1, 3])
def test_allreduce(form: str, size: int) -> None:
    def main(rank: int) -> None:
        for dtype, op in cases([*REDUCTIONS].index(form)):
            tensors = [values(rank, shape, dtype) for shape in SHAPES]
            results = REDUCTIONS[form](tensors, op=getattr(hvd, op))
            for tensor, result, shape in zip(tensors, results, SHAPES, strict=True):
                inputs = [values(each, shape, dtype) for each in range(size)]
                assert_same(result, reduced(op, inputs))
                kept = result if form.endswith("_") else inputs[rank]
                assert torch.equal(tensor, kept)
                assert (result is tensor) == form.endswith("_")

    run_ranks(size, main)


@on_ranks(2)
def test_scale_factors_apply_before_and_after(rank: int) -> None:
    tensor = torch.full((3,), float(rank + 1))
    result = hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    assert torch.equal(result, torch.full((3,), 3 * 0.5 * 3))


@on_ranks(3)
def test_adasum_of_orthogonal_vectors_is_their_sum_and_of_equal_ones_their_mean(rank: int) -> None:
    unit = torch.zeros(3)
    unit[rank] = 2.0
    assert torch.allclose(hvd.allreduce(unit, op=hvd.Adasum), torch.full((3,), 2.0))
    same = torch.arange(4.0)
    assert torch.allclose(hvd.allreduce(same, op=hvd.Adasum), same)


@pytest.mark.parametrize("form", ["", "_async", "grouped", "grouped_async"])
@pytest.mark.parametrize("size", [1, 3])
def test_allgather(form: str, size: int) -> None:
    def tensors(rank: int, dtype: torch.dtype) -> list[Tensor]:
        return [values(rank, (rows, *rest), dtype) for rows in (rank, 1, 0) for rest in [(), (2,)]]

    def gather(inputs: list[Tensor]) -> list[Tensor]:
        if form.startswith("grouped"):
            result = (
                hvd.synchronize(hvd.grouped_allgather_async(inputs))
                if form.endswith("async")
                else hvd.grouped_allgather(inputs)
            )
            assert isinstance(result, tuple)
            return list(result)
        if form:
            return [hvd.synchronize(h) for h in [hvd.allgather_async(t) for t in inputs]]
        return [hvd.allgather(t) for t in inputs]

    def main(rank: int) -> None:
        for dtype in DTYPES:
            results = gather(tensors(rank, dtype))
            columns = zip(*(tensors(each, dtype) for each in range(size)), strict=True)
            for result, parts in zip(results, columns, strict=True):
                assert torch.equal(result, torch.cat(parts))

    run_ranks(size, main)


@pytest.mark.parametrize("size", [1, 3])
def test_broadcast(size: int) -> None:
    def main(rank: int) -> None:
        for dtype in DTYPES:
            for number, shape in enumerate(SHAPES):
                root = number % size
                expected = values(root, shape, dtype)
                tensor = values(rank, shape, dtype)
                handle = hvd.broadcast_async(tensor, root)
                for result in (hvd.broadcast(tensor, root), hvd.synchronize(handle)):
                    assert torch.equal(result, expected)
                    assert result is not tensor
                assert torch.equal(tensor, values(rank, shape, dtype))
                other = tensor.clone()
                assert hvd.broadcast_(other, root) is other
                assert hvd.synchronize(hvd.broadcast_async_(tensor, root)) is tensor
                assert torch.equal(tensor, expected)
                assert torch.equal(other, expected)

    run_ranks(size, main)


@pytest.mark.parametrize("size", [1, 3])
def test_alltoall_with_splits(size: int) -> None:
    def splits(rank: int) -> list[int]:
        return [(rank + other) % 3 for other in range(size)]

    def tensor(rank: int, dtype: torch.dtype) -> Tensor:
        return values(rank, (sum(splits(rank)), 2), dtype)

    def main(rank: int) -> None:
        received = [splits(other)[rank] for other in range(size)]
        for dtype in DTYPES:
            parts = [tensor(other, dtype).split(splits(other))[rank] for other in range(size)]
            for given in (splits(rank), torch.tensor(splits(rank), dtype=torch.int32)):
                blocking = hvd.alltoall(tensor(rank, dtype), given)
                handle = hvd.alltoall_async(tensor(rank, dtype), given)
                for output, counts in (blocking, hvd.synchronize(handle)):
                    assert torch.equal(output, torch.cat(parts))
                    assert counts.dtype == torch.int32
                    assert counts.tolist() == received

    run_ranks(size, main)


@on_ranks(3)
def test_alltoall_without_splits_gives_only_the_output_when_it_blocks(rank: int) -> None:
    tensor = torch.arange(6) + 10 * rank
    expected = torch.cat([torch.arange(2) + 2 * rank + 10 * other for other in range(3)])
    assert torch.equal(hvd.alltoall(tensor), expected)
    output, counts = hvd.synchronize(hvd.alltoall_async(tensor))
    assert torch.equal(output, expected)
    assert counts.tolist() == [2, 2, 2]


SCATTERS: dict[str, Callable[..., list[Tensor]]] = {
    "reducescatter": lambda ts, op: [hvd.reducescatter(t, op=op) for t in ts],
    "reducescatter_async": lambda ts, op: [
        hvd.synchronize(h) for h in [hvd.reducescatter_async(t, op=op) for t in ts]
    ],
    "grouped_reducescatter": lambda ts, op: hvd.grouped_reducescatter(ts, op=op),
    "grouped_reducescatter_async": lambda ts, op: hvd.synchronize(
        hvd.grouped_reducescatter_async(ts, op=op)
    ),
}


@pytest.mark.parametrize("form", SCATTERS)
@pytest.mark.parametrize("size", [1, 3])
def test_reducescatter(form: str, size: int) -> None:
    shapes = [(0,), (1,), (4,), (5, 2), (6, 1, 2)]

    def main(rank: int) -> None:
        for dtype, op in cases([*SCATTERS].index(form)):
            tensors = [values(rank, shape, dtype) for shape in shapes]
            results = SCATTERS[form](tensors, getattr(hvd, op))
            for result, shape in zip(results, shapes, strict=True):
                whole = reduced(op, [values(each, shape, dtype) for each in range(size)])
                assert_same(result, whole.split(split_rows(shape[0], size))[rank])

    run_ranks(size, main)


@pytest.mark.parametrize("op", ["Sum", "Average"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_sparse_allreduce(op: str, dtype: torch.dtype) -> None:
    def sparse(rank: int) -> Tensor:
        entries = 4 * rank  # None on rank 0, and some twice on rank 2.
        indices = torch.stack([torch.arange(entries) % 3, torch.arange(entries) % 2])
        numbers = values(rank, (entries, 2), dtype)
        return torch.sparse_coo_tensor(indices, numbers, (3, 4, 2), check_invariants=True)

    def main(rank: int) -> None:
        wait = hvd.sparse_allreduce_async(sparse(rank), "table", getattr(hvd, op))
        result = wait() if rank else hvd.synchronize(wait)
        assert result.is_sparse
        expected = sum(wide(sparse(each).to_dense()) for each in range(3))
        if op == "Average":
            expected = expected / 3
        if dtype is torch.float32:
            np.testing.assert_allclose(result.to_dense().numpy(), expected, rtol=1e-6)
        else:
            np.testing.assert_array_equal(result.to_dense().numpy(), np.trunc(expected))

    run_ranks(3, main)


@pytest.mark.parametrize("what", ["shape", "op"])
@on_ranks(2)
def test_sparse_tensors_that_are_not_alike_are_refused(rank: int, what: str) -> None:
    """As where each rank has made a vocabulary of its own."""
    rows = 40 if what == "shape" and rank else 10
    op = hvd.Average if what == "op" and rank else hvd.Sum
    index, row = [[rows - 1]], torch.ones(1, 3)
    table = torch.sparse_coo_tensor(index, row, (rows, 3), check_invariants=True)
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 0 has a sparse tensor \[10, 3\]"):
        hvd.sparse_allreduce_async(table, "table", op)()


@on_ranks(2)
def test_in_place_on_tensors_that_are_not_contiguous(rank: int) -> None:
    base = torch.zeros(4, 6)
    view = base[::2, 1::2]
    view += rank + 1
    assert hvd.allreduce_(view, op=hvd.Sum) is view
    expected = torch.zeros(4, 6)
    expected[::2, 1::2] = 3
    assert torch.equal(base, expected)
    transposed = torch.arange(6.0).view(2, 3).t() * (rank + 1)
    hvd.broadcast_(transposed, 1)
    assert torch.equal(transposed, torch.arange(6.0).view(2, 3).t() * 2)


@on_ranks(2)
def test_lazily_conjugated_and_negated_tensors(rank: int) -> None:
    numbers = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    conjugated = numbers.conj()
    assert conjugated.is_conj()
    assert torch.equal(hvd.allreduce(conjugated, op=hvd.Sum), torch.tensor([3 - 6j, 9 + 3j]))
    negated = numbers.conj().imag
    assert negated.is_neg()
    assert torch.equal(hvd.allreduce(negated, op=hvd.Sum), torch.tensor([-6.0, 3.0]))
    hvd.allreduce_(conjugated, op=hvd.Sum)
    assert torch.equal(numbers, torch.tensor([3 + 6j, 9 - 3j]))
    hvd.allreduce_(negated, op=hvd.Max)
    assert torch.equal(numbers.imag, torch.tensor([6.0, -3.0]))


@on_ranks(2)
def test_results_do_not_require_gradients_and_leaves_can_be_written_in_place(rank: int) -> None:
    leaf = torch.full((2,), float(rank), requires_grad=True)
    hvd.broadcast_(leaf, 1)
    assert leaf.tolist() == [1.0, 1.0]
    handle = hvd.allreduce_async(leaf)
    assert not hvd.synchronize(handle).requires_grad


@on_ranks(2)
def test_autograd_sees_that_a_tensor_it_saved_was_overwritten(rank: int) -> None:
    weight = torch.ones(2, requires_grad=True)
    factor = torch.ones(2)
    loss = (weight * factor).sum()
    hvd.allreduce_(factor, op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@on_ranks(3)
def test_a_process_set_reduces_among_its_members_only(rank: int) -> None:
    pair = hvd.add_process_set([0, 2])
    if rank != 1:
        result = hvd.allreduce(torch.tensor([float(rank)]), process_set=pair)
        assert result.item() == 1.0
        gathered = hvd.allgather(torch.tensor([rank]), process_set=pair)
        assert gathered.tolist() == [0, 2]
        root = hvd.broadcast(torch.tensor([rank]), 2, process_set=pair)
        assert root.item() == 2
    hvd.barrier()


def test_a_rank_that_has_joined_gives_nothing() -> None:
    def main(rank: int) -> int:
        if rank != 1:
            tensor = torch.tensor([2.0])
            assert hvd.allreduce(tensor, op=hvd.Sum, name="late").item() == 4.0
            assert hvd.allgather(tensor, name="rows").tolist() == [2.0, 2.0]
        return hvd.join()

    last = run_ranks(3, main)
    assert len(set(last)) == 1
    assert last[0] in (0, 2)


@on_ranks(2)
def test_poll_and_synchronize(rank: int) -> None:
    handle = hvd.allreduce_async(torch.ones(2))
    assert hvd.poll(handle) in (True, False)
    hvd.synchronize(handle)
    with pytest.raises(ValueError, match="not created or has been cleared"):
        hvd.poll(handle)
    assert hvd.synchronize(handle) is None
