"""The reference task: handwritten digits, a network of 64-64-10, 32 samples for each worker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


class OverNorms(torch.optim.SGD):
    """Divides gradients by the norm of their tensor, so that tensors must not be cut."""

    def step(self, closure=None):  # type: ignore[no-untyped-def]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = parameter.grad / (parameter.grad.norm() + 1e-6)
        return super().step(closure)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "norms": partial(OverNorms, lr=0.01, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=2e-3),
}
BATCH = 32


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


@cache
def data() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    package = PathFinder.find_spec("sklearn")  # Which takes seconds to import.
    assert package is not None and package.origin is not None
    file = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    digits = np.loadtxt(file, delimiter=",")
    x = torch.tensor(digits[:, :-1] / 16.0, dtype=torch.float32)
    y = torch.tensor(digits[:, -1].astype(int))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    x, y = x[order], y[order]
    return x[:1500], y[:1500], x[1500:], y[1500:]


def batch(step: int, worker: int, workers: int) -> tuple[Tensor, Tensor]:
    x, y, _, _ = data()
    generator = torch.Generator().manual_seed(step)
    chosen = torch.randint(len(x), (BATCH * workers,), generator=generator)
    own = chosen[worker * BATCH : (worker + 1) * BATCH]
    return x[own], y[own]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(x), y)


def train_in_one(name: str, workers: int, steps: int | Iterable[int]) -> dict[str, Tensor]:
    """Return the weights when one process adds the gradients up in the order of the workers.

    `steps` is how many there are, or their numbers.

    Sums inside PyTorch depend on the number of its threads, which is 1 as in the workers.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    model = network()
    optimizer = OPTIMIZERS[name](model.parameters())
    for step in range(steps) if isinstance(steps, int) else steps:
        totals: list[Tensor] = []
        for worker in range(workers):
            model.zero_grad()
            loss_of(model, *batch(step, worker, workers)).backward()
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            totals = (
                [a + b for a, b in zip(totals, gradients, strict=True)] if totals else gradients
            )
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total * (1 / workers)
        optimizer.step()
    torch.set_num_threads(threads)
    return model.state_dict()


def accuracy(weights: dict[str, Tensor]) -> float:
    model = network()
    model.load_state_dict(weights)
    _, _, x, y = data()
    return float((model(x).argmax(1) == y).float().mean())
