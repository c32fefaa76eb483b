"""Halos and convolutions of slices: what comes out is the slice of the whole image's result."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.runtime.lifecycle import add_process_set
from tests.ranks import run_ranks

Tensor = torch.Tensor


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fill", [0.0, 7.0, None])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_edges_and_their_gradients(size: int, fill: float | None) -> None:
    checks = [
        edges(size, dim, widths, fill)
        for dim in (0, 1, -1)
        for widths in ((1, 2), (2, 0), (0, 1), (0, 0), (3, 3))
    ]

    def main(rank: int) -> None:
        for check in checks:
            check(rank)

    run_ranks(size, main)


def edges(
    size: int, dim: int, widths: tuple[int, int], fill: float | None
) -> Callable[[int], None]:
    """Slices of 3 and 4 entries; the oracle cuts the whole tensor, and autograd differentiates."""
    before, after = widths
    lengths = [3 + rank % 2 for rank in range(size)]
    shape = [2, 5, 3]
    shape[dim] = sum(lengths)
    whole = values(*shape).requires_grad_()
    left, right = (0, 0) if fill is None else widths
    border = [
        whole.new_full([*shape], fill or 0.0).narrow(dim, 0, width) for width in (left, right)
    ]
    extended = torch.cat([border[0], whole, border[1]], dim)
    wanted, weights = [], []
    for rank, length in enumerate(lengths):
        start = sum(lengths[:rank])
        begin = max(0, start - before) if fill is None else start
        end = start + length + (after if fill is None else before + after)
        part = extended.narrow(dim, begin, min(end, extended.shape[dim]) - begin)
        wanted.append(part)
        weights.append(values(*part.shape, seed=rank + 1))
    torch.autograd.backward(wanted, weights)
    assert whole.grad is not None
    gradients = torch.split(whole.grad, lengths, dim)

    def check(rank: int) -> None:
        part = torch.split(whole.detach(), lengths, dim)[rank].clone().requires_grad_()
        found = hvd.halo(part, dim, before, after, fill=fill)
        assert torch.equal(found, wanted[rank]), (dim, widths)
        torch.autograd.backward([found], [weights[rank]])
        torch.testing.assert_close(part.grad, gradients[rank], rtol=0, atol=1e-6)

    return check


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((2, 4, 0), r"halo: before=4 is wider than the slice, of shape \(1, 2, 3\) with 3 entries"),
        ((-1, 0, 9), "after=9 is wider than the slice"),
        ((3, 1, 1), r"an array of shape \(1, 2, 3\) has no dimension 3"),
        ((2, -1, 0), "before=-1 must be an int"),
        ((2, 0, 1.0), "after=1.0 must be an int"),
    ],
)
def test_wrong_arguments(arguments: Any, words: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            hvd.halo(torch.zeros(1, 2, 3), *arguments)

    run_ranks(2, main)


def test_ranks_that_disagree() -> None:
    def main(rank: int) -> None:
        with pytest.raises(hvd.HorovodInternalError, match=r"member . of the set has sent"):
            hvd.halo(torch.zeros(4), 0, 1 + rank, 1 + rank)
        with pytest.raises(hvd.HorovodInternalError, match="shape after the first dimension"):
            hvd.halo(torch.zeros(4, 2 + rank), 0, 1, 1)

    run_ranks(2, main)


def wrapped(model: nn.Module, dim: int) -> nn.Module:
    return hvd.SpatialConv2d.wrap(copy.deepcopy(model), dim)


def compare(size: int, model: nn.Module, images: Tensor, dims: Sequence[int]) -> None:
    """Forward is exact; gradients of images and parameters add up to those of the whole image."""
    images = images.clone().requires_grad_()
    output = model(images)
    weight = values(*output.shape, seed=9) / output[0, 0].numel()
    output.backward(weight)
    assert images.grad is not None

    def main(rank: int) -> Any:
        return [_own(model, images, weight, size, dim, rank) for dim in dims]

    for dim, of_ranks in zip(dims, zip(*run_ranks(size, main), strict=True), strict=True):
        parts, parameters = zip(*of_ranks, strict=True)
        assert torch.equal(torch.cat([part for part, _ in parts], dim), output)
        found = torch.cat([gradient for _, gradient in parts], dim)
        assert (found - images.grad).abs().max().item() <= 1e-6
        for index, parameter in enumerate(model.parameters()):
            total = torch.stack([each[index] for each in parameters]).double().sum(0)
            assert parameter.grad is not None
            assert (total - parameter.grad).abs().max().item() <= 1e-6


def _own(
    model: nn.Module, images: Tensor, weight: Tensor, size: int, dim: int, rank: int
) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
    mine = wrapped(model, dim)
    mine.zero_grad()
    part = images.detach().chunk(size, dim)[rank].clone().requires_grad_()
    output = mine(part)
    # All slices of the output but the last one are equally long.
    length = -(-weight.shape[dim] // size)
    output.backward(weight.narrow(dim, rank * length, output.shape[dim]))
    gradients = [each.grad for each in mine.parameters()]
    assert part.grad is not None
    return (output.detach(), part.grad), [each for each in gradients if each is not None]


CONVOLUTIONS: list[dict[str, Any]] = [
    {"kernel_size": 3, "padding": 1},
    {"kernel_size": 5, "padding": 2, "bias": False},
    {"kernel_size": (3, 5), "padding": (1, 2), "groups": 2},
    {"kernel_size": 3, "padding": 1, "stride": 2},
    {"kernel_size": 4, "padding": 1, "stride": 2},
    {"kernel_size": 2, "stride": 2},
    {"kernel_size": 1, "stride": 2},
    {"kernel_size": 3, "padding": 2, "dilation": 2},
    {"kernel_size": 3, "padding": "same", "dilation": (1, 3)},
    {"kernel_size": 4, "padding": "same"},
    {"kernel_size": 3, "padding": 1, "padding_mode": "reflect"},
    {"kernel_size": 5, "padding": 2, "padding_mode": "replicate"},
]


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")
@pytest.mark.parametrize("options", CONVOLUTIONS, ids=str)
def test_convolutions(options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    compare(3, nn.Conv2d(2, 4, **options), values(2, 2, 24, 24), [2, 3])


def test_three_convolutions_of_an_image_cut_in_four() -> None:
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 6, 5, padding=2), nn.Tanh(),
        nn.Conv2d(6, 2, 3, padding=1),
    )  # fmt: skip
    compare(4, model, values(1, 3, 256, 256), [2, 3])


def test_pooling_strides_and_padding_along_the_other_dimension() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 4, (3, 4), padding=(1, 0), stride=(2, 3)), nn.MaxPool2d(2), nn.ReLU(),
        nn.AvgPool2d((2, 3), padding=(0, 1)), nn.Conv2d(4, 4, 3, padding=1, dilation=1),
    )  # fmt: skip
    compare(3, model, values(2, 1, 48, 40), [2])


def test_a_convolution_without_padding_shortens_the_last_slice() -> None:
    torch.manual_seed(4)
    conv = nn.Conv2d(1, 2, 4)
    image = values(1, 1, 12, 12)

    def main(rank: int) -> Tensor:
        part = image.chunk(3, 3)[rank]
        output: Tensor = wrapped(conv, 3)(part)
        return output.detach()

    parts = run_ranks(3, main)
    assert [part.shape[3] for part in parts] == [4, 4, 1]
    assert torch.equal(torch.cat(parts, 3), conv(image))


def test_images_that_are_cut_along_both_dimensions() -> None:
    """2 x 2 patches, whose corners come by way of the neighbours in the same row."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 1, 5, padding=2))
    image = values(1, 1, 16, 12)
    whole = image.clone().requires_grad_()
    output = model(whole)
    weight = values(*output.shape, seed=1) / output.numel()
    output.backward(weight)
    assert whole.grad is not None
    gradient = whole.grad

    def patch(tensor: Tensor, rank: int) -> Tensor:
        return tensor.chunk(2, 2)[rank // 2].chunk(2, 3)[rank % 2]

    def main(rank: int) -> None:
        rows = [add_process_set([0, 1]), add_process_set([2, 3])]
        columns = [add_process_set([0, 2]), add_process_set([1, 3])]
        mine = copy.deepcopy(model)
        hvd.SpatialConv2d.wrap(mine, 2, columns[rank % 2])
        hvd.SpatialConv2d.wrap(mine, 3, rows[rank // 2])
        part = patch(image, rank).clone().requires_grad_()
        found = mine(part)
        assert torch.equal(found, patch(output, rank))
        found.backward(patch(weight, rank))
        assert part.grad is not None
        assert (part.grad - patch(gradient, rank)).abs().max().item() <= 1e-6

    run_ranks(4, main)


def test_wrapping_keeps_parameters_names_hooks_and_shared_modules() -> None:
    conv = nn.Conv2d(2, 2, 3, padding=1)
    model = nn.ModuleDict(
        {"first": conv, "again": conv, "inner": nn.Sequential(nn.Conv2d(2, 2, 1))}
    )
    calls: list[int] = []
    conv.register_forward_hook(lambda *_: calls.append(1))
    names = list(model.state_dict())
    parameters = list(model.parameters())
    assert hvd.SpatialConv2d.wrap(model, -1) is model
    assert list(model.state_dict()) == names
    assert all(map(lambda one, other: one is other, parameters, model.parameters()))
    assert model["first"] is model["again"] and "cut=[3]" in repr(model["first"])

    def main(rank: int) -> None:
        model["first"](torch.zeros(1, 2, 4, 4))
        assert isinstance(next(model["inner"].children()), hvd.SpatialConv2d)

    run_ranks(1, main)
    assert calls == [1]


REFUSED = [
    (nn.BatchNorm2d(2), "use hvd.SyncBatchNorm"),
    (nn.SyncBatchNorm(2), "use hvd.SyncBatchNorm"),
    (nn.GroupNorm(1, 2), "use hvd.SyncBatchNorm"),
    (nn.InstanceNorm2d(2), "mean and the variance of a slice"),
    (nn.LayerNorm(2), "the dimension that is cut"),
    (nn.MaxPool2d(3, 2), "pools across the border of a slice (kernel 3, stride 2, padding 0"),
    (nn.AvgPool2d(2, padding=1), "(kernel 2, stride 2, padding 1"),
    (nn.MaxPool2d(2, dilation=2), "dilation 2"),
    (nn.AdaptiveAvgPool2d(1), "hvd.allreduce it"),
    (nn.Upsample(scale_factor=2, mode="bilinear"), "mode 'bilinear'"),
    (nn.ZeroPad2d(1), "give the padding to the convolution"),
    (nn.ReflectionPad2d((0, 0, 1, 1)), "give the padding to the convolution"),
    (nn.ConvTranspose2d(1, 1, 3), "no Conv2d"),
    (nn.Conv1d(1, 1, 3), "no Conv2d"),
    (nn.LazyConv2d(1, 3), "a lazy one has run once"),
    (nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"), "'circular'"),
    (nn.Conv2d(1, 1, 3, padding=3), "pads 3 entries along dimension 2"),
    (nn.Unfold(3), "call hvd.halo before it"),
    (nn.Flatten(), "pool first"),
    (nn.Upsample(size=8), "as large as the whole image: give scale_factor=, an int"),
    (nn.Upsample(size=(8, 8)), "give scale_factor="),
    (nn.UpsamplingNearest2d(scale_factor=1.5), "scale 1.5"),
    (nn.Upsample(scale_factor=(0.5, 1)), "scale 0.5"),
    (nn.UpsamplingBilinear2d(scale_factor=2), "mode 'bilinear'"),
    (nn.Softmax(-2), "works along dimension -2, which is cut"),
    (nn.LogSoftmax(2), "works along dimension 2, which is cut"),
    (nn.GLU(-2), "works along dimension -2"),
    (nn.CosineSimilarity(2), "works along dimension 2"),
    (nn.Dropout2d(), "draws other channels for each slice"),
    (nn.MultiheadAttention(2, 1), "is not known to be right on slices"),
    (nn.LSTM(2, 2), "is not known to be right on slices"),
    (nn.Bilinear(2, 2, 2), "is not known to be right on slices"),
    (nn.MaxUnpool2d(3, 2), "pools across the border"),
    (type("Mine", (nn.AdaptiveMaxPool2d,), {})(1), "hvd.allreduce it"),
]


@pytest.mark.parametrize(("module", "words"), REFUSED, ids=str)
def test_modules_that_are_wrong_on_slices(module: nn.Module, words: str) -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Sequential(module))
    with pytest.raises(ValueError) as raised:
        hvd.SpatialConv2d.wrap(model, 2)
    text = str(raised.value)
    assert text.startswith(f"1.0 is {type(module).__name__}, which ") and words in text
    assert type(model[0]) is nn.Conv2d


def test_what_only_the_other_dimension_cuts_is_allowed() -> None:
    allowed = [
        nn.ZeroPad2d((1, 1, 0, 0)), nn.MaxPool2d((1, 3), (1, 2)), nn.AvgPool2d((2, 1), 2),
        nn.Upsample(scale_factor=2), hvd.SyncBatchNorm(1),
    ]  # fmt: skip
    hvd.SpatialConv2d.wrap(nn.Sequential(*allowed), 2)
    with pytest.raises(ValueError, match="dim=1 must be 2"):
        hvd.SpatialConv2d.wrap(nn.Conv2d(1, 1, 1), 1)


@pytest.mark.parametrize(
    "module",
    [
        nn.Upsample(scale_factor=3), nn.UpsamplingNearest2d(scale_factor=2),
        nn.Upsample(scale_factor=(2, 2), mode="nearest-exact"), nn.Softmax(1), nn.Softmax2d(),
        nn.LogSoftmax(-3), nn.GLU(1), nn.GELU(), nn.PReLU(4), nn.ChannelShuffle(2),
        nn.LocalResponseNorm(3), nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.CrossMapLRN2d(3),
        nn.Unflatten(1, (2, 2)), nn.Threshold(0.1, 2.0),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_known_to_be_right_on_slices(module: nn.Module) -> None:
    """The oracle is the slice of the whole image's result; none of these asks other ranks."""
    image = values(2, 4, 4, 8)
    whole = module(image)
    for dim in (2, 3):
        wrapped(module, dim)
        parts = [wrapped(module, dim)(part) for part in image.chunk(2, dim)]
        torch.testing.assert_close(torch.cat(parts, dim - 4), whole)


def test_what_looks_along_the_cut_dimension_is_found_with_the_input() -> None:
    """Only the input tells which dimension of it the last one is, or the third one from front."""
    linear = hvd.SpatialConv2d.wrap(nn.Sequential(nn.Linear(4, 2)), 3)
    assert linear(torch.ones(3, 4)).shape == (3, 2)  # A head behind pooling over all ranks.
    with pytest.raises(ValueError, match=r"0 is Linear, which works along dimension -1.*\(1, 3, 4"):
        linear(torch.ones(1, 3, 4, 4))
    hvd.SpatialConv2d.wrap(nn.Linear(4, 2), 2)(torch.ones(1, 3, 4, 4))
    softmax = hvd.SpatialConv2d.wrap(nn.Softmax(1), 2)
    softmax(torch.ones(1, 3, 4, 4))
    with pytest.raises(ValueError, match="module is Softmax, which works along dimension 1, "):
        softmax(torch.ones(3, 4, 4))
    pickle.loads(pickle.dumps(softmax))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Conv2d(1, 1, 2, stride=2), r"the stride 2 does not divide the slice, of shape \(1,"),
        (nn.Conv2d(1, 1, 13, padding=6), "before=6 is wider than the slice"),
        (nn.Conv2d(1, 1, (6, 1)), r"the last slice .* holds no output .* reaches over 6: cut"),
        (nn.Sequential(nn.MaxPool2d(2)), "0 is MaxPool2d, whose windows of 2 do not divide"),
    ],
    ids=str,
)  # fmt: skip
def test_slices_that_do_not_fit(model: nn.Module, words: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            wrapped(model, 2)(torch.zeros(1, 1, 5, 8))

    run_ranks(2, main)
