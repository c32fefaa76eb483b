"""Segments: what is ready first, and gradients that are missing."""

from __future__ import annotations

import copy
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from tests.ranks import run_ranks
from tests.torch.scaled import SIZE, Branches, Scaled, Watch, check, distributed, small, step

pytestmark = pytest.mark.timeout(240)


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
    names = [f"{number}.weight" for number in range(24)]
    models = [Scaled(names, [20] * len(names)) for _ in range(SIZE)]

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
    assert f"24 gradients are best reduced in {learned} segment" in capsys.readouterr().out
    assert run_ranks(SIZE, main) == [[counts[0][0], counts[0][1], *[learned] * 3]] * 2
    segments = f"{learned} segment{'' if learned == 1 else 's'}"
    assert f"24 gradients are reduced in {segments}, as {file} says" in capsys.readouterr().out


def test_auto_says_at_the_start_that_its_file_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")  # Whoever opens it waits.
    for name in ("none/learned.json", "pipe"):
        _some_steps([small() for _ in range(SIZE)], f"auto:{tmp_path / name}")
        assert f"what segmentation auto:{tmp_path / name} learns will not be kept" in caplog.text


def _some_steps(models: list[Any], segmentation: str) -> None:
    def main(rank: int) -> None:
        optimizer = distributed(models[rank], segmentation=segmentation)
        for _ in range(3):
            step(models[rank], optimizer, rank)

    run_ranks(SIZE, main)


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
