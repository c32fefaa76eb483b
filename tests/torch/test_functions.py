"""Parameters, optimizer state and objects from one rank to the others."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite
import hvdlite.torch as hvd
from tests.ranks import run_ranks
from tests.torch.on_ranks import on_ranks

SIZE = 3
Tensor = torch.Tensor
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


@pytest.mark.parametrize("form", ["state_dict", "tensors", "tuples"])
def test_broadcast_parameters(form: str) -> None:
    models = [copy.deepcopy(NET) for _ in range(SIZE)]
    with torch.no_grad():
        for rank, model in enumerate(models):
            for tensor in model.state_dict().values():
                tensor.add_(rank)

    def main(rank: int) -> None:
        model = models[rank]
        given: Any = {
            "state_dict": model.state_dict(),
            "tensors": [*model.parameters(), None, *model.buffers()],
            "tuples": [*model.named_parameters(), *model.named_buffers()],
        }[form]
        hvd.broadcast_parameters(given, root_rank=1)

    expected = {name: tensor.clone() for name, tensor in models[1].state_dict().items()}
    run_ranks(SIZE, main)
    for model in models:
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("params", [NET.named_parameters(), "weights", 3])
@on_ranks(1)
def test_broadcast_parameters_of_another_type(rank: int, params: Any) -> None:
    with pytest.raises(ValueError, match="invalid params of type"):
        hvd.broadcast_parameters(params, root_rank=0)


def test_an_optimizer_without_state_gets_the_options_of_the_root() -> None:
    models = [copy.deepcopy(NET) for _ in range(2)]

    def main(rank: int) -> Any:
        groups = [
            {"params": models[rank][0].parameters(), "lr": 0.5 / (rank + 1)},
            {"params": models[rank][2].parameters(), "betas": (0.5 + 0.1 * rank, 0.9)},
        ]
        optimizer = torch.optim.Adam(groups, lr=0.1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert list(optimizer.param_groups[0]["params"]) == list(models[rank][0].parameters())
        return optimizer.state_dict()

    states = run_ranks(2, main)
    assert states[0]["param_groups"][0]["lr"] == 0.25
    assert states[0]["param_groups"][1]["betas"] == (0.6, 0.9)
    assert states[0] == states[1]


@pytest.mark.parametrize("alias", [False, True])
@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_zero_gradients_are_left_behind_under_the_name_horovod(
    alias: bool, op: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if alias:
        monkeypatch.setitem(sys.modules, "horovod", hvdlite)

    def main(rank: int) -> None:
        weight = nn.Parameter(torch.ones(2, 3, 1, 1).to(memory_format=torch.channels_last))
        known = nn.Parameter(torch.ones(1))
        known.grad = torch.full((1,), 7.0)
        frozen = nn.Parameter(torch.ones(1), requires_grad=False)
        plain = torch.optim.SGD([weight, known, frozen], lr=1.0)
        calls: list[Callable[[], Any]] = [
            lambda: hvd.broadcast_optimizer_state(plain, root_rank=0),
            lambda: hvd.DistributedOptimizer(plain, op=op),
        ]
        for call in calls:
            weight.grad = None
            call()
            assert (weight.grad is not None) is alias
            assert frozen.grad is None
            assert known.grad.tolist() == [7.0]
            if weight.grad is not None:
                assert weight.grad.stride() == weight.stride()
                assert hvd.broadcast(weight.grad, 0).abs().sum() == 0

    run_ranks(2, main)


@on_ranks(1)
def test_lbfgs_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=r"cannot broadcast .*LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1)]), root_rank=0)


@on_ranks(2)
def test_an_optimizer_with_other_parameters_than_the_root(rank: int) -> None:
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(rank + 1)]
    optimizer = torch.optim.Adam(parameters)
    if rank == 0:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    else:
        with pytest.raises(ValueError, match=r"\[1\] parameters there, \[2\] here"):
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)


@on_ranks(SIZE)
def test_broadcast_object(rank: int) -> None:
    obj = {"epoch": 3, "call": lambda x: x + 1} if rank == 1 else None
    received = hvd.broadcast_object(obj, root_rank=1)
    assert received["epoch"] == 3
    assert received["call"](1) == 2
    assert (received is obj) == (rank == 1)
    assert hvd.broadcast_object(None) is None
    assert hvd.broadcast_object("x" * 100_000, 2, name="long") == "x" * 100_000
    pair = hvd.add_process_set([0, 2])
    if rank != 1:
        assert hvd.broadcast_object(rank, 2, process_set=pair) == 2
    with pytest.raises(ValueError, match="invalid root rank"):
        hvd.broadcast_object(1, root_rank=SIZE)


@on_ranks(SIZE)
def test_allgather_object(rank: int) -> None:
    objects = hvd.allgather_object({"rank": rank, "text": "x" * rank})
    assert objects == [{"rank": each, "text": "x" * each} for each in range(SIZE)]
    pair = hvd.add_process_set([0, 2])
    if rank != 1:
        assert hvd.allgather_object(rank, name="r", process_set=pair) == [0, 2]


@on_ranks(SIZE)
def test_allgather_object_leaves_out_a_rank_that_has_joined(rank: int) -> None:
    if rank != 1:
        assert hvd.allgather_object(rank) == [0, 2]
    hvd.join()
