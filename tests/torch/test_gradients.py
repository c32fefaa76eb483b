"""Gradients of the collectives follow Horovod's law.

Each rank gives its own gradient of its own output; the oracle says what comes back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.base.lists import split_rows
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks

SIZE = 3
ROWS = 4  # 3 ranks get 2, 1 and 1 of them
Tensor = torch.Tensor


def numbers(rank: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


def all_ranks(make: Callable[[int], Tensor]) -> Tensor:
    return torch.stack([make(rank) for rank in range(SIZE)])


def backward(outputs: list[Tensor], gradients: list[Tensor]) -> None:
    torch.autograd.backward(outputs, gradients)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_allreduce(op: str, grouped: bool) -> None:
    options: dict[str, Any] = {
        "op": getattr(hvd, op), "prescale_factor": 0.5, "postscale_factor": 3.0,
    }  # fmt: skip

    def main(rank: int) -> None:
        inputs = [torch.ones(ROWS, 2, requires_grad=True) for _ in range(2)]
        if grouped:
            outputs = hvd.grouped_allreduce(inputs, **options)
        else:
            outputs = [hvd.allreduce(tensor, **options) for tensor in inputs]
        backward(outputs, [numbers(rank, ROWS, 2), 2 * numbers(rank, ROWS, 2)])
        expected = all_ranks(lambda each: numbers(each, ROWS, 2)).sum(0) * 1.5
        if op == "Average":
            expected /= SIZE
        torch.testing.assert_close(inputs[0].grad, expected)
        torch.testing.assert_close(inputs[1].grad, 2 * expected)

    run_ranks(SIZE, main)


@on_ranks(SIZE)
def test_allreduce_with_compression(rank: int) -> None:
    tensor = torch.ones(ROWS, requires_grad=True)
    output = hvd.allreduce(tensor, compression=hvd.Compression.bf16, op=hvd.Sum)
    assert output.dtype == torch.float32
    output.backward(torch.full((ROWS,), float(rank)))
    assert torch.equal(tensor.grad, torch.full((ROWS,), 3.0))


@pytest.mark.parametrize("grouped", [False, True])
def test_allgather(grouped: bool) -> None:
    total = sum(range(SIZE + 1))

    def main(rank: int) -> None:
        tensor = torch.ones(rank + 1, 2, requires_grad=True)
        output = hvd.grouped_allgather([tensor])[0] if grouped else hvd.allgather(tensor)
        output.backward(numbers(rank, total, 2))
        averaged = all_ranks(lambda each: numbers(each, total, 2)).mean(0)
        torch.testing.assert_close(tensor.grad, averaged.split([1, 2, 3])[rank])

    run_ranks(SIZE, main)


@on_ranks(SIZE)
def test_broadcast(rank: int) -> None:
    tensor = torch.ones(ROWS, requires_grad=True)
    hvd.broadcast(tensor, 1).backward(numbers(rank, ROWS))
    averaged = all_ranks(lambda each: numbers(each, ROWS)).mean(0)
    expected = averaged if rank == 1 else torch.zeros(ROWS)
    torch.testing.assert_close(tensor.grad, expected)


@pytest.mark.parametrize("left_over", [0, 2])
def test_alltoall_sends_gradients_back(left_over: int) -> None:
    """Rows beyond the sum of the splits stay where they are, and have no gradient."""

    def splits(rank: int) -> list[int]:
        return [(rank + other) % 3 for other in range(SIZE)]

    def received(rank: int) -> list[int]:
        return [splits(other)[rank] for other in range(SIZE)]

    def main(rank: int) -> None:
        tensor = torch.ones(sum(splits(rank)) + left_over, 2, requires_grad=True)
        output, _ = hvd.alltoall(tensor, splits(rank))
        output.backward(numbers(rank, sum(received(rank)), 2))
        parts = [
            numbers(other, sum(received(other)), 2).split(received(other))[rank]
            for other in range(SIZE)
        ]
        torch.testing.assert_close(tensor.grad, torch.cat([*parts, torch.zeros(left_over, 2)]))

    run_ranks(SIZE, main)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_reducescatter(op: str, grouped: bool) -> None:
    parts = split_rows(ROWS, SIZE)

    def main(rank: int) -> None:
        tensor = torch.ones(ROWS, 2, requires_grad=True)
        options: dict[str, Any] = {"op": getattr(hvd, op), "prescale_factor": 0.5}
        if grouped:
            (output,) = hvd.grouped_reducescatter([tensor], **options)
        else:
            output = hvd.reducescatter(tensor, **options)
        output.backward(numbers(rank, parts[rank], 2))
        gathered = torch.cat([numbers(each, parts[each], 2) for each in range(SIZE)])
        expected = 0.5 * gathered * (SIZE if op == "Sum" else 1)
        torch.testing.assert_close(tensor.grad, expected)

    run_ranks(SIZE, main)


@on_ranks(SIZE)
def test_a_group_may_hold_tensors_without_gradients(rank: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    counts = torch.tensor([rank, 1])
    results = hvd.grouped_allreduce([counts, tensor, torch.ones(2)], op=hvd.Sum)
    assert results[0].tolist() == [3, 3]
    assert not results[0].requires_grad
    results[1].sum().backward()
    assert tensor.grad.tolist() == [3.0, 3.0]


@on_ranks(2)
def test_nothing_is_recorded_where_no_gradient_is_wanted(rank: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not hvd.allreduce(tensor).requires_grad
    assert not hvd.allreduce(torch.ones(2)).requires_grad


@on_ranks(2)
def test_a_second_derivative_is_refused_instead_of_being_wrong(rank: int) -> None:
    tensor = torch.ones(2, requires_grad=True)
    loss = (hvd.allreduce(tensor) ** 2).sum()
    (gradient,) = torch.autograd.grad(loss, tensor, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_a_differentiable_average_trains_like_one_process() -> None:
    def main(rank: int) -> Tensor:
        weight = torch.ones(3, requires_grad=True)
        loss = (weight * numbers(rank, 3)).square().sum()
        hvd.allreduce(loss).backward()
        assert weight.grad is not None
        return weight.grad

    gradients = run_ranks(SIZE, main)
    expected = 2 * all_ranks(lambda each: numbers(each, 3).square()).sum(0) / SIZE**2 * SIZE
    for rank in range(SIZE):  # each rank's own part of the mean: the sum over ranks is exact
        torch.testing.assert_close(gradients[rank], 2 * numbers(rank, 3).square())
    torch.testing.assert_close(torch.stack(gradients).sum(0) / SIZE, expected)
