"""SyncBatchNorm on parts of a batch is BatchNorm on the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks

CHANNELS = 4
ROWS = [5, 2, 0]  # of the ranks' batches
Tensor = torch.Tensor


def whole(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = 3 + 2 * torch.randn(sum(ROWS), CHANNELS, *shape, generator=generator)
    return values.to(dtype)


def layer(dtype: torch.dtype, **options: Any) -> nn.Module:
    norm = nn.BatchNorm1d(CHANNELS, **options)
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(torch.arange(1.0, CHANNELS + 1))
            norm.bias.copy_(torch.arange(0.0, CHANNELS))
    norm._check_input_dim = lambda input: None  # type: ignore[method-assign]  # any shape
    return norm.double() if dtype is torch.float64 else norm


OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.3, "eps": 0.1},
]
SHAPES: list[tuple[int, ...]] = [(), (3,), (3, 2), (2, 1, 3)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


@pytest.mark.parametrize(
    ("options", "shape", "dtype"),
    [
        (options, shape, DTYPES[(number + place) % 3])
        for number, options in enumerate(OPTIONS)
        for place, shape in enumerate(SHAPES)
    ],
    ids=str,
)
def test_forward_and_backward(
    options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    reference = layer(dtype, **options)
    inputs = [whole(shape, dtype, seed).requires_grad_() for seed in range(2)]
    gradients = [whole(shape, dtype, 10 + seed) for seed in range(2)]
    outputs = [reference(each) for each in inputs]
    torch.autograd.backward(outputs, gradients)
    replicas = [hvd.SyncBatchNorm(CHANNELS, **options) for _ in ROWS]
    for replica in replicas:
        replica.load_state_dict(layer(dtype, **options).state_dict())
        replica.to(next(iter(reference.state_dict().values()), torch.ones(1, dtype=dtype)).dtype)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {
        "rtol": 1e-4, "atol": 1e-4}  # fmt: skip

    def main(rank: int) -> dict[str, Tensor]:
        norm = replicas[rank]
        for number, batch in enumerate(inputs):
            part = batch.detach().split(ROWS)[rank].clone().requires_grad_()
            output = norm(part)
            assert output.dtype == part.dtype
            output.backward(gradients[number].split(ROWS)[rank])
            expected = outputs[number].detach().split(ROWS)[rank]
            torch.testing.assert_close(output.detach(), expected, **tolerance)
            assert batch.grad is not None
            torch.testing.assert_close(part.grad, batch.grad.split(ROWS)[rank], **tolerance)
        return {name: value.grad for name, value in norm.named_parameters()}

    results = run_ranks(len(ROWS), main)
    for name, parameter in reference.named_parameters():
        total = sum(result[name] for result in results)
        torch.testing.assert_close(total, parameter.grad, **tolerance)
    for replica in replicas:
        for name, buffer in reference.named_buffers():
            torch.testing.assert_close(replica.state_dict()[name], buffer, **tolerance)


def test_evaluation_and_one_rank_are_plain_batch_normalization() -> None:
    batch = whole((3,), torch.float32)
    plain = nn.BatchNorm1d(CHANNELS)
    expected = plain(batch)

    def main(rank: int) -> None:
        norm = hvd.SyncBatchNorm(CHANNELS)
        assert torch.equal(norm(batch), expected)
        norm.eval()
        copy.deepcopy(norm)
        assert torch.equal(norm(batch), copy.deepcopy(plain).eval()(batch))

    run_ranks(1, main)


def test_a_process_set_is_one_batch() -> None:
    batch = whole((2,), torch.float32)
    expected = nn.BatchNorm1d(CHANNELS)(batch)

    def main(rank: int) -> None:
        pair = hvd.add_process_set([0, 2])
        norm = hvd.SyncBatchNorm(CHANNELS, process_set=pair)
        if rank != 1:
            part = slice(0, 3) if rank == 0 else slice(3, None)
            torch.testing.assert_close(norm(batch[part]), expected[part])

    run_ranks(3, main)


@pytest.mark.parametrize("affine", [True, False])
def test_a_variance_that_is_no_half(affine: bool) -> None:
    """float16 ends at 65,504, and a standard deviation of 400 has a variance of 160,000."""
    batch = 400 * torch.randn(6, CHANNELS, generator=torch.Generator().manual_seed(1))
    plain = nn.BatchNorm1d(CHANNELS, affine=affine).half()
    expected = plain(batch.half())
    again = copy.deepcopy(plain).eval()(batch.half())

    def main(rank: int) -> None:
        norm = hvd.SyncBatchNorm(CHANNELS, affine=affine).half()
        part = slice(3 * rank, 3 * rank + 3)
        torch.testing.assert_close(norm(batch[part].half()), expected[part], rtol=0, atol=2e-3)
        torch.testing.assert_close(norm.running_var, plain.running_var, rtol=2e-3, atol=0)
        torch.testing.assert_close(norm.eval()(batch[part].half()), again[part], rtol=0, atol=4e-3)

    run_ranks(2, main)


def test_misuse() -> None:
    def main(rank: int) -> None:
        norm = hvd.SyncBatchNorm(CHANNELS)
        with pytest.raises(ValueError, match="at least 2D input"):
            norm(torch.ones(CHANNELS))
        message = "more than 1 value per channel.*, and 1 per channel from all ranks together"
        with pytest.raises(ValueError, match=message):
            norm(torch.ones(1 - rank, CHANNELS))

    run_ranks(2, main)


def test_in_a_compiled_model() -> None:
    batch = whole((2,), torch.float32)
    models = [nn.Sequential(nn.Identity(), hvd.SyncBatchNorm(CHANNELS)) for _ in range(2)]
    compiled = [torch.compile(model, backend="eager") for model in models]
    expected = nn.BatchNorm1d(CHANNELS)(batch)

    def main(rank: int) -> None:
        part = slice(0, 3) if rank == 0 else slice(3, None)
        mine = batch[part].clone().requires_grad_()
        output = compiled[rank](mine)
        torch.testing.assert_close(output, expected[part])
        output.sum().backward()
        torch.testing.assert_close(mine.grad, torch.zeros_like(mine), atol=1e-5, rtol=0)

    run_ranks(2, main)
