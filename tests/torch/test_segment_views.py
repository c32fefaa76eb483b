"""Gradients that live in segments, and optimizers that step over these."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.optimizer import gradient_exchange
from tests.ranks import run_ranks
from tests.torch.scaled import SIZE, Branches, Watch, distributed, small

pytestmark = pytest.mark.timeout(240)


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


@pytest.mark.parametrize("movers", [[0], [0, 1]])
@pytest.mark.parametrize("fuses", [None, False])
def test_a_model_that_is_moved_trains_as_before(movers: list[int], fuses: bool | None) -> None:
    models = [conv_net() for _ in range(SIZE)]

    def train(model: nn.Module, optimizer: Any, ranks: list[int], moves: bool) -> None:
        for number in range(5):
            if number == 2 and moves:
                model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
                model.double().float()
            optimizer.zero_grad()
            for rank in ranks:
                (model(images(rank, number)).square().sum() / len(ranks)).backward()
            optimizer.step()

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(models[rank].parameters(), lr=0.01),
            models[rank].named_parameters(),
            gradient_as_bucket_view=True,
            fuse_all_optimizer_ops=fuses,
        )
        train(models[rank], optimizer, [rank], rank in movers)

    run_ranks(SIZE, main)
    alone = conv_net()
    train(alone, torch.optim.Adam(alone.parameters(), lr=0.01), [*range(SIZE)], moves=False)
    for model in models:
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("as_views", "times"), [(False, 2), (True, 0)])
def test_gradients_that_stay_keep_no_memory_for_others(
    as_views: bool, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(gradient_exchange, "keep_freed_memory", told.append)
    models = [nn.Linear(30, 40) for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, gradient_as_bucket_view=as_views)
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()

    run_ranks(SIZE, main)
    assert told == [times * 4 * (30 * 40 + 40)] * SIZE


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
