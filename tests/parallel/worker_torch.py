"""One rank that trains with PyTorch, twice in one process, and compares with training alone.

python -m tests.parallel.worker_torch METHOD METHOD: how workers of data loaders start each time.
"""

from __future__ import annotations

import tests.lean  # noqa: F401

# isort: split
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import hvdlite.torch as hvd

ROWS, BATCH, STEPS = 48, 12, 4
Rows = Dataset[tuple[torch.Tensor, ...]]


def make_model() -> nn.Module:
    torch.manual_seed(5)
    # No bias before the normalization: its gradient is nothing but rounding, which Adam scales up.
    return nn.Sequential(
        nn.Linear(6, 8, bias=False), hvd.SyncBatchNorm(8), nn.ReLU(), nn.Linear(8, 3)
    )


def make_data() -> Rows:
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(ROWS, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(0, 3, (ROWS,), generator=generator))


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat(
        [tensor.detach().float().reshape(-1) for tensor in model.state_dict().values()]
    )


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: list[torch.Tensor]) -> None:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    optimizer.step()


def train_together(method: str) -> torch.Tensor:
    size = hvd.size()
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    if hvd.rank() != 0:
        nn.init.zeros_(next(model.parameters()))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), groups=2)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    data = make_data()
    sampler = DistributedSampler(data, size, hvd.rank(), shuffle=False)
    loader = DataLoader(
        data, BATCH // size, sampler=sampler, num_workers=1, multiprocessing_context=method
    )
    batches = list(loader)
    assert len(batches) == STEPS
    for batch in batches:
        step(model, optimizer, batch)
    return flat(model)


def train_alone() -> torch.Tensor:
    model = make_model()
    for module in model.modules():
        if isinstance(module, hvd.SyncBatchNorm):
            module.process_set = ALONE
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for batch in DataLoader(make_data(), BATCH):
        step(model, optimizer, batch)
    return flat(model)


class _Alone(hvd.ProcessSet):
    """A set that says it has one member, so that SyncBatchNorm is plain BatchNorm."""

    def size(self) -> int:
        return 1


ALONE = _Alone([0])


def main(methods: list[str]) -> None:
    for method in methods:
        hvd.init()
        weights = train_together(method)
        expected = train_alone()
        error = float((weights - expected).norm() / expected.norm())
        assert error < 1e-5, error
        everyone = hvd.allgather(weights[None])
        assert all(torch.equal(each, weights) for each in everyone)
        name = f"rank {hvd.rank()} of {hvd.size()}"
        hvd.shutdown()
    sys.stdout.write(f"{name} is content\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1:])
