"""Counting that begins while a loop of PyTorch trains."""

from __future__ import annotations

import threading

import torch

import hvdlite.torch as hvd
from hvdlite.common.iterations.live import counts_of
from hvdlite.common.runtime.current import current
from tests.ranks import run_ranks


def test_what_begins_within_a_step_follows_trainers_after_it() -> None:
    def main(rank: int) -> list[float]:
        model = torch.nn.Linear(3, 3)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1), named_parameters=model.named_parameters()
        )

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        step()
        runtime, begun = current(), threading.Event()

        def begin() -> None:
            counts_of(runtime, between_steps=True)
            begun.set()

        threading.Thread(target=begin).start()
        assert begun.wait(20)
        made = []
        for _ in range(3):
            step()
            made.append(counts_of(runtime).values()["steps_total"])
        return made

    assert run_ranks(2, main) == [[0, 1, 2]] * 2
