"""Handwritten digits with a parameter server: weights lie on servers, which make the steps.

    hvdlite-run -np 2 --ps-servers 1 python examples/torch_ps_digits.py
    hvdlite-run -np 2 --ps-servers 2 --ps-workers independent \\
        python examples/torch_ps_digits.py --mode async

All processes run this script. The lines marked "ps:" are all that makes it one for servers: in a
server, the DistributedOptimizer serves and does not return.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from hvdlite.torch import ps

TEST_IMAGES = 297  # of 1797


def load() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images and labels to train with, then those to test with: alike in all processes."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], labels[train], images[test], labels[test]


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits from servers.")
    parser.add_argument("--mode", choices=["sync", "async", "ssp"], default="sync")
    parser.add_argument("--staleness", type=int, help="steps, for mode ssp")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="images a step, on each worker")
    args = parser.parse_args()

    ps.init()  # ps: take the role that the environment gives.
    torch.set_num_threads(1)  # so small a network gains nothing from more
    torch.manual_seed(0)  # Whose weights come first does not matter: all have the same.
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    # ps: push gradients and pull weights in each step. A server stays here.
    optimizer = ps.DistributedOptimizer(
        optimizer, model.named_parameters(), mode=args.mode, staleness=args.staleness
    )
    images, labels, test_images, test_labels = load()

    start = time.perf_counter()
    # ps: a worker that has returned goes on where the others are.
    for step in range(optimizer.finished_steps, args.steps):
        # ps: each worker draws its own images.
        made = torch.Generator().manual_seed(step * ps.size() + ps.rank())
        chosen = torch.randint(len(images), (args.batch_size,), generator=made)
        optimizer.zero_grad()
        functional.cross_entropy(model(images[chosen]), labels[chosen]).backward()
        optimizer.step()
    seconds = time.perf_counter() - start

    if ps.rank() == 0:  # ps: one worker speaks for all.
        with torch.no_grad():
            right = (model(test_images).argmax(1) == test_labels).float().mean()
        speed = args.steps / seconds
        print(f"test accuracy {right:.2%}, {speed:.0f} steps/s, workers {ps.size()}")
    ps.shutdown()  # ps: the last worker's call ends the servers.


if __name__ == "__main__":
    main()
