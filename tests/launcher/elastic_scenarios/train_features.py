"""A script of the scenarios: what a PyTorch script has beside its weights, across resets.

Synchronized batch normalization, a scaler of losses, gradients sent as float16, sums of sparse
tensors, loaders with worker processes (persistent ones in workers with odd numbers), and a join at
the end of each epoch. The history names every sample used, and the scale of the loss after each
step.
"""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import contextlib
import os
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import hvdlite.torch as hvd
from hvdlite.common.runtime import worlds
from tests.launcher.elastic_scenarios import faults
from tests.launcher.elastic_scenarios.features import (
    BATCH,
    EPOCHS,
    GROWTH_INTERVAL,
    INITIAL_SCALE,
    OVERFLOW_STEPS,
    RATE,
    SAMPLES,
    data,
    make_model,
)

COMMIT_EVERY = int(os.environ["COMMIT_EVERY"])
HOLD_STEP, HOLD_SIZE = map(int, os.environ["HOLD"].split())
HOLD_SECONDS = 0.01  # The newcomer, which imports PyTorch, needs the processor.
Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def sockets() -> int:
    """Return how many sockets this process holds."""
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        try:
            found += stat.S_ISSOCK(path.stat().st_mode)
        except FileNotFoundError:  # That of the directory itself.
            continue
    return found


class Samples(torch.utils.data.Dataset[Batch]):
    """Indices, features and targets."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        features, targets = data()
        return torch.tensor(index), features[index], targets[index]


def look(loader: int) -> None:
    """Say what the process of a loader has inherited."""
    faults.say(loader=loader, sockets=sockets())


def modules() -> set[str]:
    """Return the modules of hvdlite that are imported."""
    return {name for name in sys.modules if name.startswith("hvdlite.")}


def children() -> int:
    """Return how many child processes this one has.

    The processes of the host are asked for their parents: a thread's list of its children is gone
    with the thread, and those of another may have been read by then.
    """
    own, found = os.getpid(), 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # It has ended.
            found += int(path.read_text().rpartition(")")[2].split()[1]) == own
    return found


class Training:
    """One worker."""

    def __init__(self) -> None:
        self.modules = modules()
        self.model = make_model(hvd.SyncBatchNorm)
        if faults.NUMBER != 0:  # Others receive the weights of the first one.
            torch.nn.init.ones_(self.model[0].weight)
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), RATE),
            self.model.named_parameters(),
            compression=hvd.Compression.fp16,
        )
        self.scaler = torch.amp.GradScaler(
            "cpu", init_scale=INITIAL_SCALE, growth_interval=GROWTH_INTERVAL
        )
        self.sampler = hvd.elastic.ElasticSampler(Samples(), seed=3)
        self.loader = torch.utils.data.DataLoader(
            Samples(), BATCH, sampler=self.sampler, num_workers=1,
            persistent_workers=faults.NUMBER % 2 == 1, worker_init_fn=look,
        )  # fmt: skip

    def batches(self, state: Any) -> Iterator[Batch]:
        """Yield the batches that are left of this epoch; at one step, wait for a newcomer."""
        for batch in self.loader:
            faults.at_step(len(state.history))
            while len(state.history) == HOLD_STEP and hvd.size() < HOLD_SIZE:
                time.sleep(HOLD_SECONDS)
                state.check_host_updates()
            yield batch

    def step(self, state: Any, batch: Batch) -> None:
        """Train with one batch, and note which samples all ranks have used."""
        indices, features, targets = batch
        number = len(state.history)
        self.optimizer.zero_grad()
        loss = (self.model(features).reshape(-1) - targets).square().mean()
        if number in OVERFLOW_STEPS and hvd.rank() == 0:
            loss = loss * torch.inf
        self.scaler.scale(loss).backward()
        faults.at("gradients sent")  # The sparse tensors of the others are in flight then.
        ones = torch.ones(len(indices))
        counts = torch.sparse_coo_tensor(indices[None], ones, (SAMPLES,), check_invariants=False)
        wait = hvd.sparse_allreduce_async(counts, "counts", hvd.Sum)
        used = hvd.allgather(indices, name="used")
        self.optimizer.synchronize()
        self.scaler.unscale_(self.optimizer)
        with self.optimizer.skip_synchronize():
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.sampler.record_batch(0, len(indices))
        assert torch.equal(wait().to_dense(), used.bincount(minlength=SAMPLES).float())
        everywhere = used.reshape(hvd.size(), -1).tolist()
        state.history = [*state.history, [state.epoch, everywhere, self.scaler.get_scale()]]
        faults.say(step=number, children=children(), imported=sorted(modules() - self.modules))


@hvd.elastic.run
def train(state: Any, training: Training) -> None:
    """Go on to the last epoch."""
    world = worlds.current_world()
    assert world is not None
    members = [number for number, _ in world.members]
    faults.say(entered=world.epoch, members=members, rank=hvd.rank(), children=children())
    while state.epoch < EPOCHS:
        for batch in training.batches(state):
            training.step(state, batch)
            if len(state.history) % COMMIT_EVERY == 0:
                state.commit()
            else:
                state.check_host_updates()
        state.commit()
        faults.at("before join")
        hvd.join()
        state.sampler.set_epoch(state.epoch + 1)
        state.epoch += 1
        state.commit()


def main() -> None:
    """Train, and say what came of it."""
    torch.set_num_threads(1)
    hvd.init()
    training = Training()
    state = hvd.elastic.TorchState(
        training.model, training.optimizer, sampler=training.sampler, scaler=training.scaler,
        epoch=0, history=[],
    )  # fmt: skip
    train(state, training)
    del training.loader
    weights = torch.cat([p.detach().flatten() for p in training.model.parameters()]).tolist()
    means = training.model[1].running_mean.tolist()
    faults.say(
        result=weights, means=means, history=state.history, rank=hvd.rank(), size=hvd.size(),
        children=children(),
    )  # fmt: skip


if __name__ == "__main__":
    main()
