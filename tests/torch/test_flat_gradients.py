"""Gradients that live in one buffer: what backward leaves there, and what is refused."""

from __future__ import annotations

import copy
import ctypes
import os

import pytest
import torch
from torch import nn

from hvdlite.torch.optimizer.flat_gradients import ALIGNMENT_BYTES, FlatGradients

Tensor = torch.Tensor

torch.manual_seed(0)
NET = nn.Sequential(
    nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 2, 1), nn.Flatten(), nn.Linear(8, 3)
)
IMAGES = torch.randn(4, 3, 4, 4)


def net(dtype: torch.dtype = torch.float32, channels_last: bool = False) -> nn.Sequential:
    made = copy.deepcopy(NET).to(dtype)
    return made.to(memory_format=torch.channels_last) if channels_last else made


def backward(model: nn.Module, step: int = 0) -> None:
    images = IMAGES.to(next(model.parameters()).dtype).roll(step, 0)
    model(images + step).square().sum().backward()


def taken(model: nn.Module) -> FlatGradients:
    flat = FlatGradients(list(model.parameters()))
    backward(model)
    for parameter in model.parameters():
        flat.adopt(parameter)
    return flat


def holds(flat: FlatGradients, parameter: torch.Tensor) -> bool:
    return parameter.grad is flat.view(parameter)


def check_same(model: nn.Module, oracle: nn.Module) -> None:
    for mine, other in zip(model.parameters(), oracle.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad)
        assert mine.grad.stride() == other.grad.stride()


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradients_are_as_without_the_buffer(dtype: torch.dtype, channels_last: bool) -> None:
    model, oracle = net(dtype, channels_last), net(dtype, channels_last)
    flat = taken(model)
    backward(oracle)
    check_same(model, oracle)
    begin = flat.buffer.data_ptr()
    end = begin + flat.buffer.numel() * flat.buffer.element_size()
    for parameter in model.parameters():
        assert parameter.grad is not None and holds(flat, parameter)
        assert begin <= parameter.grad.data_ptr() < end
        assert parameter.grad.data_ptr() % ALIGNMENT_BYTES == 0


def test_backward_accumulates_into_the_buffer() -> None:
    model, oracle = net(), net()
    flat = taken(model)
    backward(oracle)
    backward(model, 1)
    backward(oracle, 1)
    check_same(model, oracle)
    assert all(holds(flat, parameter) for parameter in model.parameters())


def test_the_buffer_holds_the_gradients_and_zeros() -> None:
    model = net()
    flat = taken(model)
    inside = sum(p.grad.double().square().sum() for p in model.parameters() if p.grad is not None)
    torch.testing.assert_close(flat.buffer.double().square().sum(), inside)
    most = sum(4 * p.numel() + ALIGNMENT_BYTES for p in model.parameters())
    assert 4 * flat.buffer.numel() < most


def test_what_is_done_to_the_buffer_is_done_to_the_gradients() -> None:
    model, oracle = net(), net()
    flat = taken(model)
    backward(oracle)
    flat.buffer.mul_(2)  # as a reduction does
    for parameter in oracle.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(2)
    check_same(model, oracle)


def test_zero_keeps_the_gradients_in_the_buffer() -> None:
    model, oracle = net(), net()
    flat = taken(model)
    flat.buffer.zero_()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())
    assert all(holds(flat, parameter) for parameter in model.parameters())
    backward(model, 1)
    backward(oracle, 1)
    check_same(model, oracle)


def test_a_gradient_that_was_set_to_none_comes_back() -> None:
    model, oracle = net(), net()
    flat = taken(model)
    model.zero_grad(set_to_none=True)
    backward(model, 1)
    backward(oracle, 1)
    assert not any(holds(flat, parameter) for parameter in model.parameters())
    for parameter in model.parameters():
        assert flat.adopt(parameter) is parameter.grad
    check_same(model, oracle)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_that_were_moved_with_the_model_come_back(set_to_none: bool) -> None:
    model, oracle = net(), net()
    flat = taken(model)
    for moved in (model, oracle):
        moved.to(memory_format=torch.channels_last).double().float()  # type: ignore[call-overload]
        moved.zero_grad(set_to_none=set_to_none)
        backward(moved, 1)
    for mine, other in zip(model.parameters(), oracle.parameters(), strict=True):
        assert other.grad is not None
        assert torch.equal(flat.adopt(mine), other.grad)
    total = sum(p.grad.sum() for p in oracle.parameters() if p.grad is not None)
    torch.testing.assert_close(flat.buffer.sum(), total)
    assert all(holds(flat, parameter) for parameter in model.parameters())


def test_another_name_for_the_same_memory_is_not_copied() -> None:
    model = net()
    flat = taken(model)
    parameter = next(model.parameters())
    assert parameter.grad is not None
    expected = parameter.grad.clone()
    parameter.grad = parameter.grad.detach()
    assert not holds(flat, parameter)
    assert torch.equal(flat.adopt(parameter), expected)
    assert holds(flat, parameter)


def test_one_gradient_does_not_look_changed_when_another_is() -> None:
    model = net()
    flat = taken(model)
    first, second, *_ = (flat.view(parameter) for parameter in model.parameters())
    version = second._version
    first.mul_(2)
    assert second._version == version


def test_scalars_and_empty_parameters_have_a_place() -> None:
    parameters = [nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.zeros(0, 2))]
    flat = FlatGradients(parameters)
    (parameters[0] * 2 + parameters[1].sum()).backward()
    for parameter in parameters:
        flat.adopt(parameter)
    assert flat.buffer[flat.buffer != 0].tolist() == [2.0]
    assert parameters[1].grad is not None and parameters[1].grad.shape == (0, 2)


def test_a_parameter_with_gaps_has_a_dense_gradient() -> None:
    parameter = torch.zeros(4, 6)[:, ::2].requires_grad_()
    flat = FlatGradients([parameter])
    parameter.sum().backward()
    assert flat.adopt(parameter).is_contiguous()
    assert torch.equal(flat.buffer, torch.ones(12))


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    flat = FlatGradients([embedding.weight])
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 0 .* of shape \(5, 2\), is sparse"):
        flat.adopt(embedding.weight)


def test_a_gradient_of_another_dtype_is_refused() -> None:
    model = nn.Linear(2, 2)
    flat = FlatGradients(list(model.parameters()))
    model.double()
    model(torch.ones(1, 2, dtype=torch.float64)).sum().backward()
    with pytest.raises(TypeError, match=r"parameter 1 .*float64.*float32.*convert the model"):
        flat.adopt(model.bias)


@pytest.mark.parametrize("rows", [4, 1])
def test_a_gradient_of_another_shape_is_refused(rows: int) -> None:
    model = nn.Linear(2, 2)
    flat = FlatGradients(list(model.parameters()), {model.weight: "head"})
    model.weight.data = torch.ones(rows, 2)
    model.weight.sum().backward()
    with pytest.raises(ValueError, match=rf"head, of shape \({rows}, 2\).*shape \(2, 2\)"):
        flat.adopt(model.weight)


def test_no_gradient_to_take_is_an_error() -> None:
    model = nn.Linear(2, 2)
    flat = FlatGradients(list(model.parameters()))
    with pytest.raises(ValueError, match="has no gradient"):
        flat.adopt(model.weight)


def test_parameters_that_cannot_share_a_buffer_are_refused() -> None:
    single, double = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"tensor 1 is torch.float64 on cpu"):
        FlatGradients([single, double])
    with pytest.raises(ValueError, match="twice"):
        FlatGradients([single, single])
    with pytest.raises(ValueError, match="at least one"):
        FlatGradients([])


def resident_bytes(tensor: torch.Tensor) -> int:
    """Return how much of a tensor has memory: other threads may take some meanwhile."""
    page = os.sysconf("SC_PAGE_SIZE")
    begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    first = begin // page * page
    pages = (ctypes.c_ubyte * -(-(end - first) // page))()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(end - first), pages) == 0
    return min(tensor.nbytes, sum(each & 1 for each in pages) * page)


def test_a_buffer_takes_memory_as_gradients_move_into_it() -> None:
    """A model needs no second copy of all its gradients."""

    size = 64 * 2**20
    parameters = [nn.Parameter(torch.ones(size // 8 // 4)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    ctypes.CDLL(None).malloc_trim(0)  # Of what other tests have left, the buffer could be made.
    flat = FlatGradients(parameters)
    assert flat.buffer.data_ptr() % ALIGNMENT_BYTES == 0
    assert resident_bytes(flat.buffer) < size // 4
    for parameter in parameters:
        flat.adopt(parameter)
    assert flat.buffer.sum() == size // 4
    assert resident_bytes(flat.buffer) == size
