"""A script of the scenarios: linear regression with PyTorch, whose history names every sample used.

The ranks gather the indices of each batch, so the history holds what was really used.
"""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import os
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.common.runtime import worlds
from tests.launcher.elastic_scenarios import faults
from tests.launcher.elastic_scenarios.regression import (
    BATCH,
    FEATURES,
    MOMENTUM,
    RATE,
    SEED,
    data,
)  # fmt: skip

EPOCHS = int(os.environ["EPOCHS"])
COMMIT_EVERY = int(os.environ.get("COMMIT_EVERY", "1"))
# Steps that wait for a world of so many ranks, as "step step size".
*HOLD_STEPS, HOLD_SIZE = map(int, os.environ.get("HOLD", "0").split())


def step_of(state: Any, batch: list[int], optimizer: Any) -> None:
    """Train with one batch, and note which samples all ranks have used."""
    samples, targets = data()
    optimizer.zero_grad()
    outputs = state.model(torch.from_numpy(samples[batch])).reshape(-1)
    (outputs - torch.from_numpy(targets[batch])).square().mean().backward()
    used = hvd.allgather(torch.tensor(batch), name="used")
    faults.at("gradients sent")
    optimizer.step()
    state.sampler.record_batch(0, BATCH)
    everywhere = [part.tolist() for part in used.reshape(hvd.size(), -1)]
    state.history = [*state.history, [state.epoch, everywhere]]


@hvd.elastic.run
def train(state: Any, optimizer: Any) -> None:
    """Go on to the last epoch."""
    world = worlds.current_world()
    assert world is not None
    members = [number for number, _ in world.members]
    faults.say(entered=world.epoch, members=members, rank=hvd.rank(), step=len(state.history))
    while state.epoch < EPOCHS:
        indices = list(state.sampler)
        for first in range(0, len(indices), BATCH):
            faults.at_step(len(state.history))
            while len(state.history) in HOLD_STEPS and hvd.size() < HOLD_SIZE:
                state.check_host_updates()
            faults.at("before step")
            step_of(state, indices[first : first + BATCH], optimizer)
            faults.say(done=len(state.history))
            if len(state.history) % COMMIT_EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.sampler.set_epoch(state.epoch + 1)
        state.epoch += 1
        state.commit()


def main() -> None:
    """Train, and say what came of it."""
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(SEED + faults.NUMBER)
    model = torch.nn.Linear(FEATURES, 1, bias=False, dtype=torch.float64)
    if faults.NUMBER == 0:
        torch.nn.init.zeros_(model.weight)  # The first state; all others receive it.
    sgd = torch.optim.SGD(model.parameters(), RATE, momentum=MOMENTUM)
    optimizer = hvd.DistributedOptimizer(sgd, model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(data()[0], seed=SEED)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, history=[])
    train(state, optimizer)
    weights = model.weight.detach().reshape(-1).tolist()
    faults.say(
        result=weights, history=state.history, rank=hvd.rank(), size=hvd.size(), epoch=state.epoch
    )


if __name__ == "__main__":
    main()
