"""A small recommender, whose embedding begins on the servers, and the same in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hvdlite.ps.tables.row_store import RowsSpec, first_rows
from hvdlite.torch import ps

ROWS, WIDTH, PADDING = 40, 4, 7


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ROWS, WIDTH, padding_idx=PADDING)
        torch.manual_seed(0)
        self.dense = nn.Linear(2 * WIDTH, 1)

    def forward(self, ids: Tensor) -> Tensor:
        # The second half of the ids is looked up in a second call, as of a second field.
        fields = [self.embedding(ids[:, :2]), self.embedding(ids[:, 2:])]
        found: Tensor = self.dense(torch.cat([each.sum(1) for each in fields], 1)).squeeze(1)
        return found


def loss_of(model: nn.Module, step: int, worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    ids = torch.randint(ROWS, (8, 4), generator=generator)
    wanted = torch.rand(8, generator=generator)
    return nn.functional.mse_loss(model(ids), wanted)


def optimizers(name: str, model: Recommender) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the embedding, and one of the rest where one is not enough."""
    if name == "sgd":
        return [torch.optim.SGD(model.parameters(), lr=0.2)]
    return [torch.optim.SparseAdam([model.embedding.weight], lr=0.1)]


def main(folder: Path, name: str, steps: int) -> None:
    torch.set_num_threads(1)
    ps.init()
    model = Recommender()
    ps.set_param_ps(model.embedding, init_in_server=True, seed=3)
    (own,) = optimizers(name, model)
    named = [*model.named_parameters()]
    patterns = None if name != "sgd" else ["*"]
    optimizer = ps.DistributedOptimizer(own, named, parameters=patterns)
    assert model.embedding.weight.shape == (0, WIDTH)
    for step in range(steps):
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, step + 1, ps.rank())  # what is not trained on is not pushed
        loss_of(model, step, ps.rank()).backward()
        optimizer.step()
    found: dict[str, Any] = {"dense": model.dense.weight.detach()}
    found["rows"] = model.embedding(torch.arange(ROWS)).detach()
    torch.save(found, folder / f"worker{ps.rank()}.pt")
    ps.shutdown()


def train_in_one(name: str, workers: int, steps: int) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    model = Recommender()
    spec = RowsSpec(ROWS, WIDTH, seed=3, zero_row=PADDING)
    first = first_rows(spec, "embedding.weight", np.arange(ROWS))
    model.embedding.weight.data = torch.tensor(first)
    (own,) = optimizers(name, model)
    for step in range(steps):
        totals: list[Tensor] = []
        for worker in range(workers):
            model.zero_grad()
            loss_of(model, step, worker).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            if totals:
                gradients = [a + b for a, b in zip(totals, gradients, strict=True)]
            totals = gradients
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total * (1 / workers)
        weight = model.embedding.weight
        if name != "sgd":
            touched = [ids_of(step, worker) for worker in range(workers)]
            ids = torch.unique(torch.cat(touched))
            gradient = weight.grad
            assert gradient is not None
            shape = gradient.shape
            sparse = torch.sparse_coo_tensor(ids[None], gradient[ids], shape, check_invariants=True)
            weight.grad = sparse
        own.step()
    return {"dense": model.dense.weight.detach(), "rows": model.embedding.weight.detach()}


def ids_of(step: int, worker: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + worker)
    return torch.randint(ROWS, (8, 4), generator=generator).flatten()
