"""Gradients as flat arrays: many small ones, and whatever else parameters have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hvdlite.ps.layouts.blocks import Array, Block
from hvdlite.ps.layouts.layout import Part
from hvdlite.torch.ps.arrays import Target, flat_array_of
from hvdlite.torch.ps.pushing_optimizer import FEW, SMALL_BYTES, Gradients

SHAPES = [(), (3,), (4, 5), (2, 3, 4), (SMALL_BYTES // 4 + 1,)]


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return parameters with gradients, of which more than a few are small."""
    made = torch.Generator().manual_seed(3)
    found = []
    for number in range(FEW + 3):
        shape = SHAPES[number % len(SHAPES)]
        found.append(torch.nn.Parameter(torch.zeros(shape, dtype=dtype)))
        found[-1].grad = torch.randn(shape, generator=made).to(dtype)
    return found


def values(arrays: list[Array]) -> list[list[float]]:
    return [array.astype(np.float64).tolist() for array in arrays]


def wanted(own: list[torch.nn.Parameter]) -> list[list[float]]:
    gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in own]
    return [each.to_dense().double().reshape(-1).tolist() for each in gradients]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_gradients_are_those_of_the_parameters_in_each_step(dtype: torch.dtype) -> None:
    own = parameters(dtype)
    gradients = Gradients(own)
    assert values(gradients.arrays(None)) == wanted(own)
    for each in own:  # New tensors, as after zero_grad(), and some that are not contiguous.
        assert each.grad is not None
        each.grad = each.grad * 2 if each.dim() < 2 else (each.grad * 2).mT.contiguous().mT
    assert values(gradients.arrays(None)) == wanted(own)
    own[0].grad = None
    assert values(gradients.arrays(None)) == wanted(own)
    own[1].grad = torch.ones(3, dtype=dtype).to_sparse()
    assert values(gradients.arrays(None)) == wanted(own)


def test_gradients_are_divided_by_a_scale() -> None:
    own = parameters(torch.float32)
    found = values(Gradients(own).arrays(torch.tensor(4.0)))
    assert found == [[value / 4 for value in each] for each in wanted(own)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scalar_is_a_tensor_of_one_element(dtype: torch.dtype) -> None:
    weight = torch.nn.Parameter(torch.tensor(2.0, dtype=dtype))
    target = Target(weight)
    assert values([flat_array_of(weight), target.array]) == [[2.0]] * 2
    target.array[0:1] = 3
    assert weight.item() == 3.0


def test_autograd_notices_weights_that_were_pulled() -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    loss = sum((each * each).sum() for each in weights)
    assert isinstance(loss, torch.Tensor)
    Target.finish([Target(each) for each in weights])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_parts_of_tensors_lie_one_after_another_in_a_block(dtype: str) -> None:
    block = Block(dtype, 0, (Part(4, 1, 3, 0), Part(5, 0, 4, 0), Part(7, 2, 3, 0)))
    tensors = [np.arange(4) + 10 * number for number in range(4)]
    tensors = [each.astype(block.new().dtype) for each in tensors]
    into = block.new()
    block.gather(tensors, 4, into)
    assert into.astype(int).tolist() == [1, 2, 10, 11, 12, 13, 32]
    back = [np.zeros_like(each) for each in tensors]
    block.scatter(into, back, 4)
    assert [each.astype(int).tolist() for each in back] == [
        [0, 1, 2, 0], [10, 11, 12, 13], [0, 0, 0, 0], [0, 0, 32, 0],
    ]  # fmt: skip
