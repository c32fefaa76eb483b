"""DistributedOptimizer: failures, refused arguments, and when gradients are sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.base.topology import Topology
from hvdlite.common.gradients.buckets import (
    CROWDED,
    ENOUGH_BYTES,
    ENOUGH_BYTES_ON_DEVICES,
    enough_bytes,
)
from hvdlite.common.runtime.current import current
from tests.ranks import run_ranks
from tests.torch.small_net import SIZE, Tensor, flat, loss_of, net, sgd


def test_a_failed_reduction_is_raised_and_the_next_step_works() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), op=hvd.Average if rank else hvd.Sum
        )
        loss_of(model, rank).backward()
        with pytest.raises(hvd.HorovodInternalError, match="reduction operation"):
            optimizer.step()
        optimizer.zero_grad()
        other = hvd.DistributedOptimizer(sgd(model), [(f"other.{n}", p) for n, p in
                                                      model.named_parameters()])  # fmt: skip
        del optimizer
        loss_of(model, rank).backward()
        other.step()

    run_ranks(2, main)
    assert torch.equal(flat(models[0]), flat(models[1]))


def make(**options: Any) -> Callable[[nn.Sequential], Any]:
    return lambda model: hvd.DistributedOptimizer(
        sgd(model), **{"named_parameters": model.named_parameters(), **options}
    )


BAD_ARGUMENTS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "predivide": (make(gradient_predivide_factor=2.0, op=hvd.Sum), "op != Average"),
    "predivide < 0": (make(gradient_predivide_factor=-2.0), "must be positive"),
    "passes": (make(backward_passes_per_step=0), "must be > 0"),
    "no tuples": (make(named_parameters=["a"]), "sequence of tuples"),
    "groups 0": (make(groups=-1), "groups should be"),
    "groups type": (make(groups="two"), "groups should be"),
    "groups items": (make(groups=[torch.ones(1)]), "lists of torch.Tensor"),
    "groups twice": (
        lambda m: make(groups=[[m[0].weight], [m[0].weight]])(m), "more than once in groups",
    ),
    "groups foreign": (make(groups=[[torch.ones(1)]]), "not a parameter"),
    "duplicates": (
        lambda m: make(named_parameters=[("a", p) for p in m.parameters()])(m), "duplicates: a",
    ),
    "unnamed": (
        lambda m: make(named_parameters=list(m.named_parameters())[1:])(m), r"not named: 0\.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_are_refused(name: str) -> None:
    build, text = BAD_ARGUMENTS[name]
    model = net()

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            build(model)

    run_ranks(1, main)


def test_num_groups_is_deprecated() -> None:
    model = net()

    def main(rank: int) -> None:
        with pytest.warns(DeprecationWarning, match="use groups"):
            make(num_groups=2)(model)

    run_ranks(1, main)


@pytest.mark.parametrize(
    ("hosts", "threads", "cores", "times"),
    [
        ([[0, 1]], 1, 2, CROWDED),
        ([[0, 1]], 1, 3, 1),
        ([[0, 1]], 4, 8, CROWDED),
        ([[0], [1]], 8, 2, 1),
    ],
)
def test_more_gradients_gather_where_the_engine_has_no_core(
    hosts: list[list[int]], threads: int, cores: int, times: int
) -> None:
    topology = Topology(tuple(map(tuple, hosts)))
    assert enough_bytes(topology, threads, cores) == times * ENOUGH_BYTES
    on_device = enough_bytes(topology, threads, cores, on_device=True)
    assert on_device == ENOUGH_BYTES_ON_DEVICES > CROWDED * ENOUGH_BYTES


def test_gradients_travel_while_backward_runs(tmp_path: Path) -> None:
    """The last layer's gradient has arrived before the first layer's is even announced."""
    width = ENOUGH_BYTES // 256  # less would wait for the gradients of other layers
    models = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, width))
        for _ in range(2)
    ]
    path = tmp_path / "timeline.json"

    def main(rank: int) -> None:
        model = models[rank]
        if rank == 0:
            current().recording.start(str(path), False)
        hvd.barrier()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        hidden = model[1](model[0](torch.ones(2, 64)))
        # Waits in the middle of backward for what was enqueued before, and for nothing else.
        hidden.register_hook(lambda gradient: hvd.barrier())
        model[2](hidden).sum().backward()
        optimizer.step()

    run_ranks(2, main)
    events = json.loads(path.read_text())
    assert max(times(events, "allreduce.2.weight")) <= min(times(events, "allreduce.0.weight"))


def times(events: list[dict[str, Any]], tensor: str) -> list[float]:
    """When something began or ended for a tensor."""
    (track,) = {e["pid"] for e in events if e.get("args", {}).get("name") == tensor}
    return [e["ts"] for e in events if e["pid"] == track and e["ph"] in "BE"]


def test_adasum_combines_the_steps_of_the_ranks() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> Tensor:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model, lr=0.1), model.named_parameters(), op=hvd.Adasum
        )
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, rank).backward()
        own = [-0.1 * p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        for parameter, start, delta in zip(model.parameters(), before, own, strict=True):
            combined = hvd.allreduce(delta, op=hvd.Adasum)
            torch.testing.assert_close(parameter.detach(), start + combined)
        optimizer.synchronize()
        with pytest.raises(AssertionError, match="Skipping synchronization"):
            optimizer.skip_synchronize().__enter__()
        return flat(model)

    results = run_ranks(SIZE, main)
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_optimizer_is_wrapped_once() -> None:
    def main(rank: int) -> None:
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        )
        with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
            hvd.DistributedOptimizer(wrapped)

    run_ranks(2, main)


def test_what_is_no_optimizer_is_named() -> None:
    def main(rank: int) -> None:
        model: Any = torch.nn.Linear(2, 1)
        with pytest.raises(TypeError, match="wraps an optimizer of PyTorch, not Linear"):
            hvd.DistributedOptimizer(model)

    run_ranks(2, main)
