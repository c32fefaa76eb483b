"""Networks for images on ranks as threads equal one process: outputs, gradients, buffers."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdlite.torch import sharding
from tests.torch.sharded_ranks import Mesh, check_against_one_process

BATCH, CHANNELS, SIDE = 12, 24, 6

pytestmark = pytest.mark.usefixtures("float64")


def images(channels: int = CHANNELS) -> Any:
    return torch.randn(BATCH, channels, SIDE, SIDE)


def ways(ranks: int, axes: int) -> list[tuple[int, ...]]:
    """All ways to cut some axes among at most all ranks."""
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    every = itertools.product(divisors, repeat=axes)
    return [cuts for cuts in every if ranks % math.prod(cuts) == 0]


@pytest.mark.parametrize(("ranks", "bias"), [(3, False), (4, True)])
def test_every_cut_of_a_convolution(ranks: int, bias: bool) -> None:
    for n, before, after in ways(ranks, 3):
        cuts: Any = {"": ((n, before, 1, 1), (after, before, 1, 1))}
        layer = nn.Conv2d(CHANNELS, 12, 3, stride=2, padding=1, bias=bias)
        found = check_against_one_process(layer, [images()], cuts, ranks)
        assert found.plan.layouts["weight"].cuts == (after, before, 1, 1)


@pytest.mark.parametrize("ranks", [3, 4])
def test_every_cut_of_other_convolutions(ranks: int) -> None:
    grouped = nn.Conv2d(CHANNELS, 2 * CHANNELS, 3, padding="same", groups=12)
    for n, groups in ways(ranks, 2):
        cuts: Any = {"": ((n, groups, 1, 1), (groups, 1, 1, 1))}
        check_against_one_process(grouped, [images()], cuts, ranks)
    for n, before, after in ways(ranks, 3):
        cuts = {"": ((n, before, 1), (before, after, 1))}
        layer = nn.ConvTranspose1d(CHANNELS, 12, 3, stride=2)
        check_against_one_process(layer, [torch.randn(BATCH, CHANNELS, SIDE)], cuts, ranks)
    cuts = {"": ((ranks, 1, 1, 1), (1, 1, 1, 1))}
    layer = nn.ConvTranspose2d(CHANNELS, CHANNELS, 2, groups=CHANNELS, dilation=2)
    check_against_one_process(layer, [images()], cuts, ranks)


class OneImage(nn.Module):
    """A convolution of each image without a batch, which has no rule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(CHANNELS, 12, 3)

    def forward(self, x: Any) -> Any:
        return torch.stack([self.inner(each) for each in x.unbind()])


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
def test_an_image_without_a_batch() -> None:
    check_against_one_process(OneImage(), [images()], {}, 2)


@pytest.mark.parametrize(("ranks", "affine"), [(2, False), (3, True), (4, True)])
def test_every_cut_of_a_batch_norm(ranks: int, affine: bool) -> None:
    """What is cut is normalized by all samples; running statistics are those of one process."""
    for cuts in [each for each in ways(ranks, 4) if SIDE % each[2] == SIDE % each[3] == 0]:
        layer = nn.BatchNorm2d(CHANNELS, momentum=0.3, affine=affine)
        of_channels = ((cuts[1],),) * (4 if affine else 2)
        found = check_against_one_process(
            layer, [3 * images() + 5], {"": (cuts, *of_channels)}, ranks
        )
        assert "running_var" in found.buffers
    for training in (True, False):
        without = nn.BatchNorm2d(CHANNELS, track_running_stats=False).train(training)
        check_against_one_process(without, [images()], {}, ranks)
    check_against_one_process(nn.BatchNorm2d(CHANNELS).eval(), [images()], {}, ranks)


def test_a_batch_norm_of_half_precision_and_large_means() -> None:
    """Statistics are computed in float32, and not from sums of squares."""
    layer = nn.BatchNorm1d(CHANNELS).float()
    x = (torch.randn(BATCH, CHANNELS) + 1000).float()
    cuts: Any = {"": ((4, 1), (1,), (1,), (1,), (1,))}
    check_against_one_process(layer, [x], cuts, 4, tolerance=2e-3)


class Bottleneck(nn.Module):
    """A block of ResNet, with what stands before and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.n0 = nn.BatchNorm2d(CHANNELS)
        self.c1 = nn.Conv2d(CHANNELS, 12, 1, bias=False)
        self.n1 = nn.BatchNorm2d(12)
        self.c2 = nn.Conv2d(12, 12, 3, stride=2, padding=1, bias=False)
        self.n2 = nn.BatchNorm2d(12)
        self.c3 = nn.Conv2d(12, 2 * CHANNELS, 1)
        self.n3 = nn.BatchNorm2d(2 * CHANNELS)
        self.down = nn.Sequential(
            nn.Conv2d(CHANNELS, 2 * CHANNELS, 1, stride=2, bias=False),
            nn.BatchNorm2d(2 * CHANNELS),
        )
        self.head = nn.Linear(2 * CHANNELS, 12)

    def forward(self, x: Any) -> Any:
        x = functional.max_pool2d(functional.relu(self.n0(self.stem(x)), inplace=True), 3, 1, 1)
        y = functional.relu(self.n1(self.c1(x)))
        y = self.n3(self.c3(functional.relu(self.n2(self.c2(y)))))
        x = functional.avg_pool2d(functional.relu(y + self.down(x)), 2, ceil_mode=True)
        x = functional.interpolate(functional.pad(x, (0, 1)), scale_factor=2)
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


def test_a_block_of_resnet() -> None:
    ranks = 4
    channels: Any = {
        "c1": ((1, 1, 1, 1), (ranks, 1, 1, 1)), "c2": ((1, 1, 1, 1), (ranks, 1, 1, 1)),
        "c3": ((1, ranks, 1, 1), (1, ranks, 1, 1)),
    }  # fmt: skip
    for cuts in ({}, channels, {"c2": ((ranks, 1, 1, 1), (1, 1, 1, 1))}):
        found = check_against_one_process(Bottleneck(), [images(3)], cuts, ranks)
        assert len(found.buffers) == 15, "each norm has three"
    check_against_one_process(Bottleneck().eval(), [images(3)], channels, ranks)


class Mixer(nn.Module):
    """A block of an MLP mixer, after patches: words are mixed, then channels."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, CHANNELS, 2, stride=2)
        words = (SIDE // 2) ** 2
        self.n1, self.n2 = nn.LayerNorm(CHANNELS), nn.LayerNorm(CHANNELS)
        self.words = nn.Sequential(nn.Linear(words, 12), nn.GELU(), nn.Linear(12, words))
        self.mixed = nn.Sequential(nn.Linear(CHANNELS, 48), nn.GELU(), nn.Linear(48, CHANNELS))

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = x + self.words(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return (x + self.mixed(self.n2(x))).mean(1)


def test_a_mixer() -> None:
    ranks = 4
    columns: Any = {
        "words.0": ((1, 1, 1), (1, ranks)), "words.2": ((1, 1, ranks), (ranks, 1)),
        "mixed.0": ((1, 1, 1), (1, ranks)), "mixed.2": ((1, 1, ranks), (ranks, 1)),
    }  # fmt: skip
    for cuts in ({}, columns, {"patches": ((1, 1, 1, 1), (ranks, 1, 1, 1))}):
        check_against_one_process(Mixer(), [images(3)], cuts, ranks)


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_search_for_a_block_of_resnet(search: str) -> None:
    limit = sum(each.nbytes for each in Bottleneck().parameters()) // 2
    check_against_one_process(Bottleneck(), [images(3)], {}, 4, search=search, memory_limit=limit)


def test_strategies_that_cannot_be_met() -> None:
    for cuts, words in (
        ({"c1": ((1, 1, 2, 1), (1, 1, 1, 1))}, r"c1 needs all of a dimension .*\(of Conv2d 'c1'\)"),
        ({"c1": ((1, 2, 1, 1), (1, 1, 1, 1))}, r"c1: .* belong together by 2 and 1 .* would fit"),
        ({"n1": ((1, 5, 1, 1), *((5,),) * 4)}, r"n1: .* 12 by 5 \(of BatchNorm2d 'n1'\); .* fit"),
    ):
        with pytest.raises(ValueError, match=words):
            sharding.plan(Bottleneck(), images(3), cuts, Mesh((4,)))
