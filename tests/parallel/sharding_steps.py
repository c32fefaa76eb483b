"""Optimizers that step over local tensors of DTensors, against one process.

python -m tests.parallel.sharding_steps FOLDER
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hvdlite.torch as hvd
from hvdlite.torch import sharding
from hvdlite.torch.sharding.dtensor import (
    DTensor,
    Replicate,
    Shard,
    distribute_tensor,
    placement_types,
)
from tests.parallel.sharding_edges import SHARE, WIDTH, expect, own
from tests.torch.sharded_training import COUNTS, Counting

STEPS = 2
Partial: Any = getattr(placement_types, "Partial", None) or placement_types._Partial
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "nesterov": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "adam, fused": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "adamw, foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p, 0.5),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "nadam": lambda p: torch.optim.NAdam(p, 0.01),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
    "asgd": lambda p: torch.optim.ASGD(p, 0.01),
    "rprop": lambda p: torch.optim.Rprop(p, 0.01),
}
OPTIMIZERS |= {f"counts in {each}": partial(Counting, lr=0.05, counts=each) for each in COUNTS}


class Network(torch.nn.Module):
    """A part that is cut, with a number in it, and a plain parameter beside it."""

    def __init__(self, columns_first: bool = True) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.part = _Part()
        self.beside = torch.nn.Parameter(torch.randn(3, dtype=torch.float64))
        n = hvd.size()
        column, row = ((1, 1), (1, n)), ((1, n), (n, 1))
        self.strategies: dict[str, Any] = {"0": column, "2": row} if columns_first else {"0": row}

    def sharded(self) -> Network:
        strategies = {f"layers.{name}": each for name, each in self.strategies.items()}
        sharding.shard(self.part, example=own(whole_batch()), strategies=strategies)
        return self

    def loss(self, batch: Any) -> Any:
        return self.part(batch).square().mean() + self.beside.sin().sum()

    def copies(self) -> list[Any]:
        """The parameters as they are: to set them is quicker than to plan a part again."""
        return [each.detach().clone() for each in self.parameters()]

    @torch.no_grad()
    def set(self, values: list[Any]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.copy_(value)

    def values(self) -> list[Any]:
        return [
            each.full_tensor() if isinstance(each, DTensor) else each.detach()
            for each in self.parameters()
        ]


class _Part(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH)
        ).double()
        self.scale = torch.nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.unused = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        return self.layers(x) * self.scale


def whole_batch() -> Any:
    return torch.arange(SHARE * hvd.size() * WIDTH, dtype=torch.float64).reshape(-1, WIDTH).sin()


def groups_of(network: Network) -> list[dict[str, Any]]:
    weights = [each for each in network.parameters() if each.ndim > 1]
    others = [each for each in network.parameters() if each.ndim <= 1]
    return [{"params": weights}, {"params": others, "lr": 0.02}]


def train(network: Network, optimizer: Any, batch: Any, steps: int = STEPS) -> None:
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    for _ in range(steps):
        optimizer.zero_grad()
        network.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(network.part.parameters(), 0.1)
        optimizer.step()
        schedule.step()


def check_equal(found: Any, wanted: Any, what: str) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-10), what


def check_optimizers() -> None:
    """Groups with rates of their own, a schedule, clipped gradients; state stays of DTensors."""
    network = Network().sharded()
    begin = network.copies()
    for name, make in OPTIMIZERS.items():
        alone = Network()
        network.set(begin)
        train(alone, make(groups_of(alone)), whole_batch())
        optimizer = sharding.local_step(make(groups_of(network)))
        train(network, optimizer, own(whole_batch()))
        check_equal(network.values(), alone.values(), name)
        for parameter, state in optimizer.state.items():
            if parameter == "steps":
                assert state == STEPS
                continue
            for key, value in state.items():
                is_part = isinstance(parameter, DTensor) and (
                    key not in ("step", "mu_product", "eta", "mu")
                )
                assert isinstance(value, DTensor) == (is_part and value is not None), (name, key)
                if isinstance(value, DTensor):
                    assert value.shape == parameter.shape, (name, key)
                    assert value.placements == parameter.placements, (name, key)
        assert network.part.unused not in optimizer.state or not any(
            key == "step" and value for key, value in optimizer.state[network.part.unused].items()
        )


def check_another_layout(folder: Path) -> None:
    """State is saved after such steps, and goes on in another layout, by torch's own step too."""
    make = OPTIMIZERS["amsgrad"]
    alone = Network()
    lone = make(groups_of(alone))
    train(alone, lone, whole_batch(), 2)
    network = Network().sharded()
    optimizer = sharding.local_step(make(groups_of(network)))
    train(network, optimizer, own(whole_batch()), 2)
    hvd.checkpoint.save(folder / "steps", {"model": network, "optimizer": optimizer})
    train(alone, lone, whole_batch(), 2)
    for locally in (True, False):
        other = Network(columns_first=False).sharded()
        held = other.part.layers[0].weight.to_local().shape
        assert held != network.part.layers[0].weight.to_local().shape
        resumed = make(groups_of(other))
        if locally:
            resumed = sharding.local_step(resumed)
        train(other, resumed, own(whole_batch()), 1)  # So that there is state to be loaded.
        hvd.checkpoint.load(folder / "steps", {"model": other, "optimizer": resumed})
        train(other, resumed, own(whole_batch()), 2)
        check_equal(other.values(), alone.values(), f"resumed, {locally=}")


def check_copies() -> None:
    """A copy steps over the DTensors as torch does, and both go on alike."""
    network = Network().sharded()
    optimizer = sharding.local_step(OPTIMIZERS["amsgrad"](groups_of(network)))
    assert sharding.local_step(optimizer) is optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    train(network, optimizer, own(whole_batch()), 1)
    twins = copy.deepcopy({"network": network, "optimizer": optimizer})
    assert type(twins["optimizer"]) is torch.optim.AdamW
    assert type(pickle.loads(pickle.dumps(sharding.local_step(_plain())))) is torch.optim.SGD
    optimizer.load_state_dict(optimizer.state_dict())
    for each in ({"network": network, "optimizer": optimizer}, twins):
        optimizer_of_it = each["optimizer"]
        loss = each["network"].loss(own(whole_batch()))
        optimizer_of_it.zero_grad()
        loss.backward(retain_graph=True)
        assert float(optimizer_of_it.step(lambda: torch.tensor(3.0))) == 3
        expect("modified by an inplace operation", loss.backward, kind=RuntimeError)
    check_equal(twins["network"].values(), network.values(), "a copy")


def _plain() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], 0.1)


def check_scaled_gradients() -> None:
    """An overflow on one rank is one on all, whether or not the step unscales by itself."""
    network = Network().sharded()
    begin = network.copies()
    for name in ("amsgrad", "adam, fused"):
        found = []
        for locally in (False, True):
            network.set(begin)
            # torch asks along the axes that the first gradient is cut along.
            parameters = sorted(network.part.parameters(), key=lambda each: -each.ndim)
            optimizer = OPTIMIZERS[name](parameters)
            if locally:
                optimizer = sharding.local_step(optimizer)
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
            for step in range(3):
                optimizer.zero_grad()
                scaler.scale(network.loss(own(whole_batch()))).backward()
                if step == 1 and hvd.rank() == 1:
                    network.part.layers[0].weight.grad.to_local()[0, 0] = float("inf")
                before = network.values()
                scaler.step(optimizer)
                scaler.update()
                after = network.values()
                same = [torch.equal(*each) for each in zip(before, after, strict=True)]
                assert step != 1 or all(same), (name, same)
            assert scaler.get_scale() == 2.0
            found.append(network.values())
        check_equal(*found, name)


def check_summands() -> None:
    """A gradient of which ranks hold summands, as DTensor computes them, is summed for the step."""
    mesh = init_device_mesh("cpu", (hvd.size(),))
    whole, found = torch.arange(6.0), []
    for prepare in (lambda each: each, sharding.local_step):
        weight = torch.nn.Parameter(distribute_tensor(whole.clone(), mesh, [Replicate()]))
        share = torch.full((6,), float(hvd.rank() + 1))
        square = weight.square().sum()
        weight.grad = DTensor.from_local(share, mesh, [Partial()])
        prepare(torch.optim.SGD([weight], 1.0)).step()
        expect("modified by an inplace operation", square.backward, kind=RuntimeError)
        found.append(weight.to_local().detach())
    assert torch.equal(found[1], whole - sum(range(1, hvd.size() + 1)))
    assert torch.equal(*found)


def check_refused() -> None:
    network = Network().sharded()
    parameters = list(network.parameters())
    for make in (torch.optim.LBFGS, torch.optim.Adafactor):
        expect("each element on its own", sharding.local_step, make(parameters))
    traced = torch.optim.SGD(parameters, 0.1, differentiable=True)
    expect("differentiable=True", sharding.local_step, traced)
    scheduled = torch.optim.SGD(parameters, 0.1)
    torch.optim.lr_scheduler.ExponentialLR(scheduled, 0.9)
    expect("before the scheduler", sharding.local_step, scheduled)
    linear = torch.nn.Linear(2, 2)
    wrapped = hvd.DistributedOptimizer(torch.optim.SGD(linear.parameters(), 0.1))
    expect("plain optimizer", sharding.local_step, wrapped)
    optimizer = sharding.local_step(torch.optim.Adam(parameters, 0.1))
    train(network, optimizer, own(whole_batch()), 1)
    weight = network.part.layers[0].weight
    optimizer.state[weight]["exp_avg"] = torch.zeros(WIDTH, WIDTH, dtype=torch.float64)
    place = next(i for i, each in enumerate(parameters) if each is weight)
    expect(f"parameter {place} of group 0", optimizer.step)
    mesh = init_device_mesh("cpu", (2, hvd.size() // 2))
    square = torch.ones(WIDTH, WIDTH)
    placements = ([Replicate(), Shard(0)], [Shard(0), Replicate()])
    one, other = (distribute_tensor(square, mesh, each) for each in placements)
    assert hvd.size() != 4 or one.to_local().shape == other.to_local().shape
    crossed = torch.nn.Parameter(one)
    crossed.grad = torch.ones_like(crossed)
    optimizer = sharding.local_step(torch.optim.Adam([crossed], 0.1))
    optimizer.step()
    optimizer.state[crossed]["exp_avg"] = other
    expect("its exp_avg is a DTensor", optimizer.step)


def check_state_of_another_dtype() -> None:
    """A DTensor of state says the dtype that it has, whatever its parameter has."""
    mesh = init_device_mesh("cpu", (hvd.size(),))
    weight = torch.nn.Parameter(distribute_tensor(torch.ones(WIDTH).bfloat16(), mesh, [Shard(0)]))
    weight.grad = torch.ones_like(weight)
    optimizer = sharding.local_step(Precise([weight], 1.0))
    for _ in range(2):
        optimizer.step()
    state = optimizer.state[weight]["sum"]
    assert state.dtype == state._spec.tensor_meta.dtype == torch.float32
    assert torch.equal((state + state).full_tensor(), torch.full((WIDTH,), 4.0))


class Precise(torch.optim.SGD):
    """Has state in float32, whatever its parameters are."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["sum"] = torch.zeros_like(parameter, dtype=torch.float32)
                state["sum"] += parameter.grad
                parameter.sub_(state["sum"] * 0.1)


CHECKS = [
    check_optimizers,
    check_copies,
    check_scaled_gradients,
    check_summands,
    check_refused,
    check_state_of_another_dtype,
]

if __name__ == "__main__":
    hvd.init_process_group()
    for check in CHECKS:
        check()
    check_another_layout(Path(sys.argv[1]))
    dist.destroy_process_group()
    sys.stdout.write("is content\n")
