"""A recommender that learns from synthetic clicks: its rows lie on servers, the rest on the ranks.

    hvdlite-run -np 2 --ps-servers 2 python examples/torch_ps_embedding.py

Each batch pulls the few rows of its users and items from the servers, which made them, and pushes
their gradients. No rank ever has the whole embedding, which may be larger than its memory. The
dense layers are small, and are reduced among the ranks. All processes run this script; servers stay
in `ps.DistributedOptimizer`. The lines marked "hvdlite:" are all that makes it distributed.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

import hvdlite.torch as hvd
from hvdlite.torch import ps

USERS, ITEMS = 600, 300
TASTES = 4  # What a user likes, and what an item is, as so many hidden numbers.
CLICKS_A_STEP = 512  # Of all ranks together.


class Recommender(nn.Module):
    """Ids of users and items, each of shape (B,), to the logits of clicks, of shape (B,)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        # hvdlite: on the device "meta" an embedding takes no memory.
        self.rows = nn.Embedding(USERS + ITEMS, width, device="meta")
        self.dense = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """Return the logits."""
        user, item = self.rows(torch.stack([users, USERS + items]))
        logits: Tensor = self.dense(torch.cat([user, item, user * item], dim=1)).squeeze(1)
        return logits + (user * item).sum(1)


class Clicks:
    """Users who click on what they like; `seed` tells one stream of clicks from another."""

    def __init__(self, seed: int) -> None:
        tastes = torch.Generator().manual_seed(0)
        self._users = torch.randn(USERS, TASTES, generator=tastes)
        self._items = torch.randn(ITEMS, TASTES, generator=tastes)
        self._generator = torch.Generator().manual_seed(seed)

    def next(self, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return users and items that they were shown, and whether they clicked."""
        users = torch.randint(USERS, (count,), generator=self._generator)
        items = torch.randint(ITEMS, (count,), generator=self._generator)
        liking = (self._users[users] * self._items[items]).sum(1)
        clicked = torch.rand(count, generator=self._generator) < torch.sigmoid(2 * liking)
        return users, items, clicked.float()


def area_under_curve(scores: Tensor, clicked: Tensor) -> float:
    """Return how often a click has a higher score than what was not clicked on."""
    order = scores.argsort().argsort().double()
    hits = clicked.sum().item()
    misses = len(clicked) - hits
    return float((order[clicked > 0].sum() - hits * (hits - 1) / 2) / (hits * misses))


def main() -> None:
    """Train, and print how well clicks are told from what is not clicked on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)

    ps.init()  # hvdlite: takes the role that hvdlite-run has given to this process.
    model = Recommender(options.width)
    # hvdlite: servers make and keep the rows; what else there is goes by allreduce.
    ps.set_param_ps(model.rows, init_in_server=True, seed=1, scale=0.3)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    optimizer = ps.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.dense.state_dict(), root_rank=0)

    clicks = Clicks(seed=1 + ps.rank())
    started = time.monotonic()
    for _ in range(options.steps):
        users, items, clicked = clicks.next(CLICKS_A_STEP // ps.size())
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(users, items), clicked)
        loss.backward()
        optimizer.step()
    seconds = time.monotonic() - started

    users, items, clicked = Clicks(seed=999).next(5_000)
    with torch.no_grad():
        area = area_under_curve(model(users, items), clicked)
    if ps.rank() == 0:
        print(f"{options.steps} steps in {seconds:.1f} s on {ps.size()} ranks")
        print(f"area under the curve: {area:.3f}")
    ps.shutdown()


if __name__ == "__main__":
    main()
