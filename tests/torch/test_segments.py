"""Gradients that are reduced in segments: how many reductions the engine makes, and of what."""

from __future__ import annotations

import copy
import json
import threading
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.plain.config import Config
from hvdlite.common.runtime.state import current
from tests.ranks import run_ranks
from tests.resnet50 import PARAMETERS
from tests.torch.scaled import Scaled, Watch, distributed, resnet, small, step

pytestmark = pytest.mark.timeout(120)
SIZE = 2


def check(model: Scaled) -> None:
    """One step of SGD with rate 1 from 0.5, with the mean of the factors 1 and 2."""
    for number, parameter in enumerate(model.named.values()):
        torch.testing.assert_close(parameter, torch.full_like(parameter, 0.5 - 1.5 * (number + 1)))


@pytest.mark.parametrize(
    ("options", "order", "counts"),
    [
        ({"segmentation": "size:96.54,3.46"}, "ready", [108, 53]),
        ({"segmentation": "size"}, "ready", [108, 53]),
        ({"segmentation": "size:80,20"}, "ready", [61, 100]),
        ({"segmentation": "size:60,20,20"}, "ready", [29, 32, 100]),
        ({"segmentation": "size:50,50"}, "ready", [23, 138]),
        ({"segmentation": "index:28,60,160"}, "ready", [29, 32, 100]),
        ({"fuse_grad_size_in_MB": 16, "fuse_grad_count": 50}, "model", [51, 49, 33, 9, 9, 10]),
        ({"segmentation": "mb:32,50"}, "model", [51, 51, 37, 18, 4]),
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


ORDER = ["b.bias", "b.weight", "a.bias", "a.weight"]


def sequential() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


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


def test_a_segment_of_gradients_of_two_types_is_two() -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        for name in ("a.weight", "b.bias"):
            model.named[name].data = model.named[name].data.to(torch.float64)
        watch = Watch()
        optimizer = distributed(model, segmentation="size:100")
        for _ in range(2):
            step(model, optimizer, rank)
            assert sorted(map(sorted, watch.take())) == [  # type: ignore[type-var]
                ["a.bias", "b.weight"],
                ["a.weight", "b.bias"],
            ]

    run_ranks(SIZE, main)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.never, self.table = nn.Linear(2, 2), nn.Embedding(5, 2, sparse=True)

    def forward(self, second: bool) -> torch.Tensor:
        output = self.first(torch.ones(2)) + self.table(torch.tensor(3))
        return (self.second(output) if second else output).sum()


def test_missing_sparse_and_unused_gradients_hold_up_no_segment() -> None:
    """`second` is used by one rank, and in some steps by none; `never` by nobody."""
    torch.manual_seed(0)
    start = Branches()
    models = [copy.deepcopy(start) for _ in range(SIZE)]
    alone = copy.deepcopy(start)

    def main(rank: int) -> None:
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), segmentation="size:50,50"
        )
        watch = Watch()
        for number in range(4):
            optimizer.zero_grad()
            model(second=rank == 1 and number != 2).backward()
            optimizer.step()
            dense = [run for run in watch.take() if "table" not in run[0]]
            assert len(dense) == (2 if number else 1)  # at first `never` has a segment with others
        assert sorted(map(len, dense)) == [2, 2]

    run_ranks(SIZE, main)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(4):
        plain.zero_grad()
        ((alone(second=False) + alone(second=number != 2)) / 2).backward()
        plain.step()
    for model in models:
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


class Reversed(nn.Module):
    """Used in another order than that in which it is defined."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(2, 2, bias=False)
        self.middle = nn.Linear(2, 2, bias=False)
        self.first = nn.Linear(2, 2, bias=False)

    def forward(self) -> torch.Tensor:
        return self.last(self.middle(self.first(torch.ones(2)))).sum()


def test_after_the_first_step_segments_follow_the_order_of_readiness() -> None:
    models = [Reversed() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            segmentation="index:0,2",
        )
        watch, runs = Watch(), []
        for _ in range(3):
            optimizer.zero_grad()
            model().backward()
            optimizer.step()
            runs.append(watch.take())
        assert sorted(map(sorted, runs[0])) == [  # type: ignore[type-var]
            ["first.weight"], ["last.weight", "middle.weight"],
        ]  # fmt: skip
        assert runs[1] == runs[2] == [["last.weight"], ["middle.weight", "first.weight"]]

    run_ranks(SIZE, main)


def test_segments_are_ready_while_backward_runs() -> None:
    """The first segment has ended before the gradient that closes the second one is there."""
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = distributed(model, segmentation="index:1,3")
        reduced = threading.Event()
        current().engine.observe(lambda run: reduced.set() if "b." in run.names[0] else None)

        def wait(gradient: torch.Tensor) -> None:
            assert reduced.wait(30), "nothing was reduced while backward ran"

        # Autograd goes through what was made last first: b, and then a.
        waiting = model.named["a.weight"] * 1.0
        waiting.register_hook(wait)
        a = waiting.sum() + model.named["a.bias"].sum()
        b = model.named["b.weight"].sum() + model.named["b.bias"].sum()
        (a + b).backward()
        optimizer.step()

    run_ranks(SIZE, main)


@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_compression_and_several_passes(compression: str) -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model, watch = models[rank], Watch()
        optimizer = distributed(
            model,
            segmentation="size:50,50",
            compression=getattr(hvd.Compression, compression),
            backward_passes_per_step=2,
        )
        for _ in range(2):
            model((rank + 1) / 2).backward()
        optimizer.step()
        assert len(watch.take()) == 2
        check(model)

    run_ranks(SIZE, main)


def test_auto_switches_on_all_ranks_at_once_and_settles(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks that switched at different steps would report different groups, and fail."""
    file = tmp_path / "learned.json"
    models = [resnet(0.001) for _ in range(SIZE)]

    def main(rank: int) -> list[int]:
        optimizer = distributed(models[rank], segmentation=f"auto:{file}")
        watch, counts = Watch(), []
        settled = False
        while not settled:  # the time limit of the test ends it
            step(models[rank], optimizer, rank)
            counts.append(len(watch.take()))
            settled = optimizer._exchange.segment_schedule.auto.frozen
        for _ in range(3):
            step(models[rank], optimizer, rank)
            counts.append(len(watch.take()))
        return counts

    counts = run_ranks(SIZE, main)
    assert counts[0] == counts[1]
    assert len(set(counts[0])) > 1  # it has tried something
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
    (model,) = json.loads(file.read_text())["models"].values()
    learned = len(model["ends"])
    assert counts[0][-3:] == [learned] * 3
    assert f"161 gradients are best reduced in {learned} segments" in capsys.readouterr().out
    assert run_ranks(SIZE, main) == [[counts[0][0], counts[0][1], *[learned] * 3]] * 2
    assert (
        f"161 gradients are reduced in {learned} segments, as {file} says"
        in capsys.readouterr().out
    )


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "text": ({"segmentation": "size:10"}, ValueError, "segmentation='size:10': .*sum to 10"),
    "type": ({"segmentation": 5}, TypeError, "segmentation=5"),
    "two": (
        {"segmentation": "size", "fuse_grad_count": 5}, ValueError, "fuse_grad_count: give one"
    ),
    "groups": ({"segmentation": "size", "groups": 2}, ValueError, "groups and segmentation"),
    "op": ({"segmentation": "size", "op": hvd.Max}, ValueError, "only Average and Sum"),
    "count": ({"fuse_grad_count": "5"}, TypeError, "fuse_grad_count='5'"),
    "unknown": ({"fuse_grad": 5}, TypeError, "fuse_grad"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_are_refused(case: str) -> None:
    options, error, text = BAD[case]

    def main(rank: int) -> None:
        with pytest.raises(error, match=text):
            distributed(small(), **options)

    run_ranks(1, main)


def test_indices_that_do_not_fit_the_model_are_refused_in_each_step() -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = distributed(models[rank], segmentation="index:1,2")
        for _ in range(2):  # it does not go away
            with pytest.raises(ValueError, match="the last index must be 3"):
                models[rank](1.0).backward()
            optimizer.zero_grad()

    run_ranks(SIZE, main)


def test_fleets_name_of_the_count() -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        watch = Watch()
        step(models[rank], distributed(models[rank], _fuse_grad_size_in_TFLOPS=2), rank)
        assert [len(run) for run in watch.take()] == [4]

    run_ranks(SIZE, main)


@pytest.mark.parametrize("collective", ["allgather", "reducescatter"])
def test_fusion_of_other_collectives(collective: str) -> None:
    def main(rank: int) -> None:
        hvd.set_comm_fusion({collective: {"mode": "size", "config": 1}})
        runs: list[int] = []
        current().engine.observe(lambda run: runs.append(len(run.names)))
        tensors = [torch.full((1 << 17,), float(rank)) for _ in range(6)]  # of half a MiB
        call: Callable[..., Any] = getattr(hvd, f"grouped_{collective}")
        results = call(tensors, name="some")
        assert len(results) == 6
        # The inputs of all ranks count for what is gathered.
        assert runs == ([1] * 6 if collective == "allgather" else [2, 2, 2])

    run_ranks(SIZE, main)


def conv_net() -> nn.Sequential:
    torch.manual_seed(7)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)
    ).to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def images(rank: int, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + rank)
    return torch.randn(3, 2, 4, 4, generator=generator).contiguous(
        memory_format=torch.channels_last
    )


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"segmentation": "size:50,50"},
        {"segmentation": "mb:-1", "backward_passes_per_step": 2},
        {"segmentation": "size:50,50", "compression": hvd.Compression.bf16},
        {"segmentation": "auto"},
    ],
    ids=str,
)
def test_gradients_that_live_in_segments(options: dict[str, Any], set_to_none: bool) -> None:
    models = [conv_net() for _ in range(SIZE)]
    passes = options.get("backward_passes_per_step", 1)
    tolerance = 2e-2 if "compression" in options else 1e-5

    def train(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for number in range(6):
            optimizer.zero_grad(set_to_none=set_to_none)
            for rank in ranks:
                for part in range(passes):
                    (model(images(rank, 2 * number + part)).square().sum() / len(ranks)).backward()
            optimizer.step()

    def main(rank: int) -> None:
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(
            inner, model.named_parameters(), gradient_as_bucket_view=True, **options
        )
        watch = Watch()
        train(model, optimizer, [rank])
        if options.get("segmentation") != "auto":
            storages = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
            sent = [len(run) for run in watch.take()][-len(storages) :]
            assert sent == [1] * len(storages)  # one tensor each: the buffer itself
            assert len(storages) == {"size:50,50": 2, "mb:-1": 3}.get(
                options.get("segmentation", ""), 1
            )

    run_ranks(SIZE, main)
    alone = conv_net()
    plain = torch.optim.SGD(alone.parameters(), lr=0.01, momentum=0.9)
    train(alone, plain, [*range(SIZE)])
    for ours, theirs in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_gradients_in_segments_are_protected_and_may_be_missing() -> None:
    """Clipping before synchronize() is refused as ever; what a rank has not is zero."""
    torch.manual_seed(0)
    start = Branches()
    models = [copy.deepcopy(start) for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            model.named_parameters(),
            gradient_as_bucket_view=True,
        )
        for number in range(4):
            optimizer.zero_grad()
            model(second=rank == 1 and number != 2).backward()
            optimizer.step()
        optimizer.zero_grad()
        model(second=True).backward()
        torch.nn.utils.clip_grad_norm_(model.first.parameters(), 1e-3)
        with pytest.raises(RuntimeError, match="was changed after it was sent"):
            optimizer.step()

    run_ranks(SIZE, main)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_views_on_one_rank_alone_are_an_error() -> None:
    models = [small() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = distributed(
            models[rank], segmentation="size:100", gradient_as_bucket_view=rank == 0
        )
        models[rank](1.0).backward()
        with pytest.raises(hvd.HorovodInternalError, match="size:100 as views, rank 1 has"):
            optimizer.step()

    run_ranks(SIZE, main)


MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    weights = [p for p in model.parameters() if p.dim() > 1]
    return [
        {"params": weights},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02},
    ]


@pytest.mark.parametrize("kind", MAKERS)
def test_steps_over_segments_are_those_of_the_optimizer(kind: str) -> None:
    """With two groups, a schedule of the learning rate, hooks, and a checkpoint in the middle."""
    models = [conv_net() for _ in range(SIZE)]
    calls: list[int] = []

    def train(model: nn.Module, optimizer: Any, ranks: list[int], steps: range) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        for number in steps:
            optimizer.zero_grad()
            for rank in ranks:
                (model(images(rank, number)).square().sum() / len(ranks)).backward()
            optimizer.step()
            scheduler.step()

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            MAKERS[kind](groups_of(model)),
            model.named_parameters(),
            segmentation="size:60,40",
            fuse_all_optimizer_ops=True,
        )
        optimizer.register_step_post_hook(lambda *arguments: calls.append(rank))
        train(model, optimizer, [rank], range(4))
        assert optimizer._fused is not None
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        train(model, optimizer, [rank], range(4, 7))

    run_ranks(SIZE, main)
    assert sorted(calls) == [0] * 7 + [1] * 7
    alone = conv_net()
    plain = MAKERS[kind](groups_of(alone))
    train(alone, plain, [*range(SIZE)], range(4))
    plain.load_state_dict(copy.deepcopy(plain.state_dict()))
    train(alone, plain, [*range(SIZE)], range(4, 7))
    for ours, theirs in zip(models[0].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("asked", [True, None, False])
def test_an_optimizer_that_cannot_step_over_segments_steps_as_ever(asked: bool | None) -> None:
    models = [conv_net() for _ in range(SIZE)]
    warned = threading.Lock()
    texts: list[str] = []

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adagrad(model.parameters()),
            model.named_parameters(),
            gradient_as_bucket_view=True,
            fuse_all_optimizer_ops=asked,
        )
        for number in range(2):
            model(images(rank, number)).square().sum().backward()
            optimizer.synchronize()
            with warned, warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with optimizer.skip_synchronize():
                    optimizer.step()
                texts.extend(str(each.message) for each in caught)
            optimizer.zero_grad()

    run_ranks(SIZE, main)
    assert len([text for text in texts if "Adagrad is not one of" in text]) == 2 * bool(asked)
    for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(one, other)
