"""A small convolutional network that learns to read handwritten digits, on any number of ranks.

    python examples/torch_digits.py                       # one rank
    hvdlite-run -np 2 python examples/torch_digits.py     # two

The lines marked "hvdlite:" are all that makes the script distributed. The data comes with
scikit-learn. A step works on the same number of images whatever the number of ranks, so that the
learning rate fits all of them.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

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


def share(data: TensorDataset, batch: int, *, shuffle: bool) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of this rank's share of `data`."""
    # hvdlite: each rank reads its own part of the data.
    sampler = DistributedSampler(data, hvd.size(), hvd.rank(), shuffle=shuffle, drop_last=shuffle)
    return DataLoader(data, batch, sampler=sampler)


def accuracy(model: nn.Module, test: DataLoader[tuple[Tensor, ...]]) -> float:
    """The share of right answers on the test images of all ranks."""
    model.eval()
    right = torch.zeros(2)  # right answers, answers
    with torch.no_grad():
        for images, labels in test:
            right += torch.tensor([(model(images).argmax(1) == labels).sum(), len(labels)])
    # hvdlite: a metric is summed over the ranks.
    right = hvd.allreduce(right, name="accuracy", op=hvd.Sum)
    return float(right[0] / right[1])


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=64, help="images a step, on all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()
    if args.epochs < 1:
        parser.error("--epochs must be at least 1")

    hvd.init()  # hvdlite: who am I, and who else is there?
    torch.set_num_threads(1)  # so small a network gains nothing from more
    torch.manual_seed(args.seed + hvd.rank())  # another dropout on each rank
    train_data, test_data = load()
    train = share(train_data, max(1, args.batch_size // hvd.size()), shuffle=True)
    test = share(test_data, 256, shuffle=False)

    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    # hvdlite: average the gradients of all ranks before each step.
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    # hvdlite: start from the same weights everywhere.
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    seconds, reached = 0.0, 0.0
    for epoch in range(args.epochs):
        train.sampler.set_epoch(epoch)
        model.train()
        start = time.perf_counter()
        for images, labels in train:
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
        schedule.step()
        seconds += time.perf_counter() - start
        reached = accuracy(model, test)
        if hvd.rank() == 0:  # hvdlite: one rank speaks for all.
            print(f"epoch {epoch + 1:2}: loss {loss.item():.4f}, accuracy {reached:.2%}")

    if hvd.rank() == 0:
        images_per_second = args.epochs * len(train.sampler) * hvd.size() / seconds
        print(f"test accuracy {reached:.2%}, {images_per_second:.0f} images/s, ranks {hvd.size()}")


if __name__ == "__main__":
    main()
