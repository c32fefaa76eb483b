"""torch_digits.py, in a job that ranks may leave and join while it trains.

    python examples/elastic_torch_digits.py                                           # one rank
    hvdlite-run -np 2 --min-np 1 -H localhost:2 python examples/elastic_torch_digits.py

Kill a rank (the script prints its process id): the others go on from the last commit, and a new
one takes its place. The lines marked "elastic:" are what torch_digits.py does not have. The data
comes with scikit-learn. A step works on the same number of images whatever the number of ranks.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hvdlite.torch as hvd

TEST_IMAGES = 360  # of 1797


class Net(nn.Sequential):
    """Two convolutions and two dense layers: images (B, 1, 8, 8) to scores (B, 10)."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(64 * 4 * 4, 128),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(128, 10),
        )


def load() -> tuple[TensorDataset, TensorDataset]:
    """The digits, shuffled alike on every rank: what to train with, and what to test with."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def accuracy(model: nn.Module, test: TensorDataset) -> float:
    """The share of right answers on the test images of all ranks."""
    images, labels = (tensor[hvd.rank() :: hvd.size()] for tensor in test.tensors)
    model.eval()
    with torch.no_grad():
        right = torch.tensor([float((model(images).argmax(1) == labels).sum()), len(labels)])
    right = hvd.allreduce(right, name="accuracy", op=hvd.Sum)
    return float(right[0] / right[1])


# elastic: this function is called again after each change of the ranks, with the same state.
@hvd.elastic.run
def train(state: Any, data: TensorDataset, test: TensorDataset, args: argparse.Namespace) -> None:
    """Train until all epochs are done."""
    batch = max(1, args.batch_size // hvd.size())  # The size may be another one each time.
    loader = DataLoader(data, batch, sampler=state.sampler)
    while state.epoch < args.epochs:
        state.model.train()
        start = time.perf_counter()
        for number, (images, labels) in enumerate(loader):
            state.optimizer.zero_grad()
            loss = functional.cross_entropy(state.model(images), labels)
            loss.backward()
            state.optimizer.step()
            now = time.perf_counter()
            state.loss, state.seconds, start = loss.item(), state.seconds + now - start, now
            state.sampler.record_batch(number, batch)  # elastic: which images are done
            state.commit()  # elastic: what a failure goes back to
        state.schedule.step()
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        state.accuracy = accuracy(state.model, test)
        state.commit()
        if hvd.rank() == 0:
            print(
                f"epoch {state.epoch:2}: loss {state.loss:.4f}, "
                f"accuracy {state.accuracy:.2%}, ranks {hvd.size()}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, on all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")

    hvd.init()
    print(f"rank {hvd.rank()} is process {os.getpid()}", flush=True)
    torch.set_num_threads(1)  # so small a network gains nothing from more
    torch.manual_seed(args.seed + hvd.rank())  # another dropout on each rank
    data, test = load()
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # elastic: all that a rank needs to go on. No broadcast is needed: newcomers receive the state.
    state = hvd.elastic.TorchState(
        model=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs),
        sampler=hvd.elastic.ElasticSampler(data),
        commit="step",  # copies no weights: the commit comes right after each step
        epoch=0,
        loss=0.0,  # elastic: also when the ranks change after the last step of an epoch
        seconds=0.0,
        accuracy=0.0,
    )
    train(state, data, test, args)
    if hvd.rank() == 0:
        images_per_second = args.epochs * len(data) / state.seconds
        print(
            f"test accuracy {state.accuracy:.2%}, {images_per_second:.0f} images/s, "
            f"ranks {hvd.size()}"
        )


if __name__ == "__main__":
    main()
