"""Gradients that are reduced in segments: how many reductions the engine makes, and of what."""

from __future__ import annotations

import threading
import warnings
from itertools import islice
from typing import Any

import pytest

import hvdlite.torch as hvd
from hvdlite.common.settings.config import Config
from tests.ranks import run_ranks
from tests.resnet50 import PARAMETERS
from tests.torch.scaled import SIZE, Watch, check, distributed, resnet, small, step

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize(
    ("options", "order", "counts"),
    [
        ({"segmentation": "size:96.54,3.46"}, "ready", [108, 53]),
        pytest.param({"segmentation": "size"}, "ready", [108, 53], marks=pytest.mark.soak),
        pytest.param({"segmentation": "size:80,20"}, "ready", [61, 100], marks=pytest.mark.soak),
        pytest.param(
            {"segmentation": "size:60,20,20"}, "ready", [29, 32, 100], marks=pytest.mark.soak
        ),
        ({"segmentation": "size:50,50"}, "ready", [23, 138]),
        ({"segmentation": "index:28,60,160"}, "ready", [29, 32, 100]),
        ({"fuse_grad_size_in_MB": 16, "fuse_grad_count": 50}, "model", [51, 49, 33, 9, 9, 10]),
        pytest.param(
            {"segmentation": "mb:32,50"}, "model", [51, 51, 37, 18, 4], marks=pytest.mark.soak
        ),
        ({"fuse_grad_count": 50}, "model", [51, 51, 37, 18, 4]),
        ({"segmentation": "count:50"}, "model", [51, 51, 51, 8]),
        ({"fuse_all_reduce_ops": False}, "model", [1] * 161),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_the_engine_reduces_the_segments_of_the_vendors_rules(
    options: dict[str, Any], order: str, counts: list[int]
) -> None:
    """The published vectors, with all 25,557,032 gradients of ResNet-50."""
    models = [resnet(1) for _ in range(SIZE)]
    names = [name for name, _ in PARAMETERS]
    left = iter(names if order == "model" else names[::-1])
    expected = sorted(sorted(islice(left, count)) for count in counts)

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        optimizer = distributed(model, **options)
        for number in range(2):
            step(model, optimizer, rank)
            assert sorted(map(sorted, watch.take())) == expected
            if number == 0:
                check(model)

    run_ranks(SIZE, main)


@pytest.mark.parametrize(
    ("text", "least", "most"), [("mb:-1", 107, 107), ("threshold:0.32", 3, 10)]
)
def test_other_rules_through_the_engine(text: str, least: int, most: int) -> None:
    models = [resnet() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        optimizer = distributed(model, segmentation=text)
        for _ in range(3):
            step(model, optimizer, rank)
            runs = watch.take()
            assert sorted(name for run in runs for name in run) == sorted(model.named)
            assert least <= len(runs) <= most

    run_ranks(SIZE, main)


def test_without_a_segmentation_gradients_are_sent_when_ready() -> None:
    models = [resnet() for _ in range(SIZE)]

    def main(rank: int) -> None:
        watch = Watch()
        step(models[rank], distributed(models[rank]), rank)
        assert sorted(name for run in watch.take() for name in run) == sorted(models[rank].named)
        check(models[rank])

    run_ranks(SIZE, main)


@pytest.mark.parametrize("how", ["call by size", "call by index", "fusion", "environment"])
def test_what_was_set_for_the_process_set_holds_for_all_optimizers(how: str) -> None:
    models = [small() for _ in range(SIZE)]
    config = Config(segmentation="size:50,50") if how == "environment" else None

    def main(rank: int) -> None:
        if how == "call by size":
            hvd.set_split_strategy_by_size([50, 50])
        elif how == "call by index":
            hvd.set_split_strategy_by_idx([1, 3])
        elif how == "fusion":
            hvd.set_comm_fusion({"allreduce": {"mode": "index", "config": [1]}})
        watch = Watch()
        optimizer = distributed(models[rank])
        for _ in range(2):
            step(models[rank], optimizer, rank)
            assert sorted(map(len, watch.take())) == [2, 2]

    run_ranks(SIZE, main, config=config)


def test_an_argument_wins_over_what_was_set() -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        watch = Watch()
        optimizer = distributed(models[rank], segmentation="size:100")
        step(models[rank], optimizer, rank)
        assert [len(run) for run in watch.take()] == [4]

    run_ranks(SIZE, main, config=Config(segmentation="size:50,50"))


def test_a_later_call_and_sizes_win_with_a_warning() -> None:
    models = [small() for _ in range(SIZE)]
    warned = threading.Lock()

    def main(rank: int) -> None:
        with warned, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.set_split_strategy_by_idx([0, 1, 2, 3])
            hvd.set_split_strategy_by_size([50, 50])
            hvd.set_split_strategy_by_size([100])
            texts = [str(each.message) for each in caught]
        assert texts == [
            "size:50,50 wins over index:0,1,2,3: both are set",
            "size:100 takes the place of size:50,50, which was set before",
        ]
        watch = Watch()
        step(models[rank], distributed(models[rank]), rank)
        assert [len(run) for run in watch.take()] == [4]
        for late in (
            lambda: hvd.set_split_strategy_by_size([100]),
            lambda: hvd.set_split_strategy_by_idx([3]),
            lambda: hvd.set_comm_fusion({"allreduce": {"mode": "auto", "config": None}}),
        ):
            with pytest.raises(ValueError, match="reduced already"):
                late()

    run_ranks(SIZE, main)


@pytest.mark.parametrize("other", ["size:100", "index:1,3", "threshold"])
def test_another_segmentation_on_one_rank_is_an_error_that_names_both(other: str) -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = distributed(models[rank], segmentation=other if rank else "size:50,50")
        theirs = "none" if other == "threshold" else f"segmentation={other}"
        text = f"rank 0 has segmentation=size:50,50, rank 1 has {theirs}"
        models[rank](1.0).backward()
        with pytest.raises(hvd.HorovodInternalError, match=text):
            optimizer.step()

    run_ranks(SIZE, main)
