"""No path to a step applies the gradients of one rank alone without saying so."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Own(torch.optim.SGD):
    """A user's optimizer, which has a step of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


MAKES: dict[str, Make] = {
    "plain": lambda model: torch.optim.SGD(model.parameters(), lr=1.0),
    "foreach": lambda model: torch.optim.SGD(model.parameters(), lr=1.0, foreach=True),
    "fused": lambda model: torch.optim.SGD(model.parameters(), lr=1.0, fused=True),
    "own": lambda model: Own(model.parameters(), lr=1.0),
}


def refused(model: nn.Linear, step: Callable[[], Any], message: str = "of this rank alone") -> None:
    """The step raises, and changes nothing."""
    with pytest.raises(RuntimeError, match=message):
        step()
    assert model.weight.item() == 0


def on_ranks(
    check: Callable[[int, nn.Linear, Any, torch.optim.Optimizer], None], make: Make
) -> None:
    """``check(rank, model, wrapped, original)`` with a gradient of 1 on rank 0, and 3 on rank 1."""

    def main(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        original = make(model)
        wrapped = hvd.DistributedOptimizer(original, model.named_parameters())
        model(torch.full((1, 1), 1.0 + 2 * rank)).sum().backward()
        check(rank, model, wrapped, original)

    run_ranks(2, main)


@pytest.mark.parametrize("name", MAKES)
def test_only_the_step_of_the_wrapper_steps(name: str) -> None:
    def check(rank: int, model: nn.Linear, wrapped: Any, original: torch.optim.Optimizer) -> None:
        refused(model, lambda: type(original).step(wrapped))
        refused(model, original.step)
        wrapped.step()
        assert model.weight.item() == -2

    on_ranks(check, MAKES[name])


def test_a_scaler_that_steps_the_optimizer_that_was_wrapped() -> None:
    def check(rank: int, model: nn.Linear, wrapped: Any, original: torch.optim.Optimizer) -> None:
        scaler = torch.amp.GradScaler("cpu", 1.0)
        scaler.scale(torch.ones(1))
        refused(model, lambda: scaler.step(original))
        wrapped.step()

    on_ranks(check, MAKES["plain"])


@pytest.mark.parametrize("name", MAKES)
def test_a_scaler(name: str) -> None:
    def main(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        wrapped = hvd.DistributedOptimizer(MAKES[name](model), model.named_parameters())
        scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=1000)
        for inputs in (1.0 + 2 * rank, float("inf") if rank == 1 else 1.0):
            wrapped.zero_grad()
            scaler.scale(model(torch.full((1, 1), inputs)).sum()).backward()
            scaler.step(wrapped)
            scaler.update()
            assert model.weight.item() == -2
        assert scaler.get_scale() == 2  # all ranks have skipped the second step

    run_ranks(2, main)


def test_schedulers_that_put_themselves_before_step() -> None:
    for wrap_first in (True, False):

        def check(
            rank: int,
            model: nn.Linear,
            wrapped: Any,
            original: torch.optim.Optimizer,
            wrap_first: bool = wrap_first,
        ) -> None:
            target = wrapped if wrap_first else original
            scheduler = torch.optim.lr_scheduler.StepLR(target, 1, gamma=0.5)
            refused(model, original.step)
            wrapped.step()
            scheduler.step()
            assert model.weight.item() == -2
            assert wrapped.param_groups[0]["lr"] == 0.5

        on_ranks(check, MAKES["plain"])


def test_copies() -> None:
    def check(rank: int, model: nn.Linear, wrapped: Any, original: torch.optim.Optimizer) -> None:
        for make_copy in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied"):
                make_copy(wrapped)
        wrapped.step()

    on_ranks(check, MAKES["plain"])


def test_adasum() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        original = torch.optim.SGD(model.parameters(), lr=1.0)
        wrapped = hvd.DistributedOptimizer(original, model.named_parameters(), op=hvd.Adasum)
        model(torch.full((1, 1), 1.0 + rank)).sum().backward()
        refused(model, original.step)
        refused(model, lambda: torch.optim.SGD.step(wrapped))
        wrapped.step()
        assert model.weight.item() == hvd.broadcast(model.weight, 0).item() != 0

    run_ranks(2, main)


def test_without_other_ranks_the_original_steps_too() -> None:
    def main(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        original = torch.optim.SGD(model.parameters(), lr=1.0)
        hvd.DistributedOptimizer(original, model.named_parameters())
        model(torch.ones(1, 1)).sum().backward()
        original.step()
        assert model.weight.item() == -1

    run_ranks(1, main)


def test_after_shutdown_the_original_steps_on_its_own() -> None:
    models: list[tuple[nn.Linear, torch.optim.Optimizer]] = []

    def check(rank: int, model: nn.Linear, wrapped: Any, original: torch.optim.Optimizer) -> None:
        wrapped.step()
        models.append((model, original))

    on_ranks(check, MAKES["plain"])
    for model, original in models:
        original.step()
        assert model.weight.item() == -4
