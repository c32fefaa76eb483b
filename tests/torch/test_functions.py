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

SIZE = 3
Tensor = torch.Tensor
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
Make = Callable[[Any], torch.optim.Optimizer]


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
def test_broadcast_parameters_of_another_type(params: Any) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match="invalid params of type"):
            hvd.broadcast_parameters(params, root_rank=0)

    run_ranks(1, main)


def everything(state: Any) -> list[Any]:
    """All leaves of a state_dict, in order."""
    if isinstance(state, dict):
        return [leaf for key in state for leaf in [key, *everything(state[key])]]
    if isinstance(state, (list, tuple)):
        return [type(state), *(leaf for each in state for leaf in everything(each))]
    return [state]


def assert_same_state(first: Any, second: Any) -> None:
    ours, theirs = everything(first), everything(second)
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype
            assert torch.equal(one, other)
        else:
            assert one == other


def optimizers() -> dict[str, Make]:
    """Every optimizer of torch, in a way that has state where it can."""
    special: dict[str, Make] = {
        "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        "Adam": lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.8, 0.9), amsgrad=True),
        "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    }
    names = [name for name in dir(torch.optim) if isinstance(getattr(torch.optim, name), type)]
    classes = {name: getattr(torch.optim, name) for name in names}
    found = {
        name: lambda p, cls=cls: cls(p)
        for name, cls in classes.items()
        if issubclass(cls, torch.optim.Optimizer)
        and name not in ("Optimizer", "LBFGS", "Muon", "SparseAdam", *special)
    }
    return {**found, **special}  # Muon and SparseAdam have tests of their own


def test_the_optimizers_of_torch_were_found() -> None:
    assert {"Adadelta", "Adagrad", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop"} <= set(
        optimizers()
    )


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", optimizers())
def test_broadcast_optimizer_state(name: str, wrapped: bool) -> None:
    """The root has made steps and changed its options, as after a checkpoint; others have not."""
    models = [copy.deepcopy(NET) for _ in range(SIZE)]

    def main(rank: int) -> Any:
        model = models[rank]
        optimizer: Any = optimizers()[name](model.parameters())
        if rank == 1:
            for _ in range(2):
                model(torch.ones(4, 3)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] = 0.25
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
        return copy.deepcopy(optimizer.state_dict())

    states = run_ranks(SIZE, main)
    assert states[0]["state"], "there is no state to compare"
    assert states[0]["param_groups"][0]["lr"] == 0.25
    for state in states:
        assert_same_state(state, states[1])


def test_broadcast_optimizer_state_of_muon_and_sparse_adam() -> None:
    def muon(rank: int) -> Any:
        weight = nn.Parameter(torch.ones(3, 2) * (rank + 1))
        optimizer = torch.optim.Muon([weight])
        if rank == 0:
            weight.grad = torch.ones(3, 2)
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return optimizer.state_dict()

    def sparse_adam(rank: int) -> Any:
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SparseAdam(table.parameters())
        if rank == 0:
            table(torch.tensor([rank])).sum().backward()
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=table)
        return optimizer.state_dict()

    for main in [sparse_adam, muon] if hasattr(torch.optim, "Muon") else [sparse_adam]:
        states = run_ranks(2, main)
        assert states[0]["state"]
        assert_same_state(states[0], states[1])


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
    assert_same_state(states[0], states[1])


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


def test_lbfgs_is_refused() -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=r"cannot broadcast .*LBFGS state"):
            hvd.broadcast_optimizer_state(torch.optim.LBFGS([torch.ones(1)]), root_rank=0)

    run_ranks(1, main)


def test_an_optimizer_with_other_parameters_than_the_root() -> None:
    def main(rank: int) -> None:
        parameters = [nn.Parameter(torch.ones(2)) for _ in range(rank + 1)]
        optimizer = torch.optim.Adam(parameters)
        if rank == 0:
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        else:
            with pytest.raises(ValueError, match=r"\[1\] parameters there, \[2\] here"):
                hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    run_ranks(2, main)


def test_broadcast_object() -> None:
    def main(rank: int) -> None:
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

    run_ranks(SIZE, main)


def test_allgather_object() -> None:
    def main(rank: int) -> None:
        objects = hvd.allgather_object({"rank": rank, "text": "x" * rank})
        assert objects == [{"rank": each, "text": "x" * each} for each in range(SIZE)]
        pair = hvd.add_process_set([0, 2])
        if rank != 1:
            assert hvd.allgather_object(rank, name="r", process_set=pair) == [0, 2]

    run_ranks(SIZE, main)


def test_allgather_object_leaves_out_a_rank_that_has_joined() -> None:
    def main(rank: int) -> None:
        if rank != 1:
            assert hvd.allgather_object(rank) == [0, 2]
        hvd.join()

    run_ranks(SIZE, main)
