"""Optimizers of PyTorch whose state goes through a checkpoint; see `test_checkpoints`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hvdlite.ps.context import new_store
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowsSpec
from hvdlite.torch import ps
from hvdlite.torch.ps.updater import TorchRows, TorchUpdater
from tests.ps.cluster import Cluster, NewCluster, in_threads
from tests.ps.digits import OPTIMIZERS

SAVED, LAST = 3, 6
Model = nn.Module


def new_model() -> Model:
    """Return a model whose weights do not depend on what other threads draw meanwhile.

    Its tensors fill vectors: PyTorch rounds the elements behind the last vector in another way, and
    these are others where tensors lie one behind another.
    """
    model, made = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32)), torch.Generator()
    made.manual_seed(0)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3, generator=made)
    return model


def backward(model: Model, step: int, worker: int) -> None:
    made = torch.Generator().manual_seed(100 * step + worker)
    x, y = torch.randn(8, 8, generator=made), torch.randn(8, 32, generator=made)
    model.zero_grad()
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))


def train_in_one(kind: str) -> list[Tensor]:
    """Return the weights when one process averages the gradients of both workers."""
    model = new_model()
    optimizer = OPTIMIZERS[kind](model.parameters())
    for step in range(LAST):
        of_workers = []
        for worker in range(2):
            backward(model, step, worker)
            of_workers.append([parameter.grad for parameter in model.parameters()])
        for parameter, *own in zip(model.parameters(), *of_workers, strict=True):
            parameter.grad = (own[0] + own[1]) / 2
        optimizer.step()
    return list(model.parameters())


def check(new_cluster: NewCluster, folder: Path, servers: int, kind: str, of_thread: Any) -> None:
    """Train with 2 servers, go on with another number, and compare bits."""
    partition = "tensor" if kind == "norms" else "element"

    def updater_of(described: TableDescription) -> TorchUpdater:
        optimizer = OPTIMIZERS[kind](new_model().parameters())
        return TorchUpdater(optimizer, described, whole=partition == "tensor")

    def work(cluster: Cluster, number: int, begin: int, end: int, after: Any) -> list[Tensor]:
        of_thread.worker = cluster.worker(f"worker {number}", number)
        model = new_model()
        optimizer = ps.DistributedOptimizer(
            OPTIMIZERS[kind](model.parameters()), model.named_parameters(), partition=partition
        )
        if begin:
            assert ps.load(folder) == begin
        for step in range(begin, end):
            backward(model, step, number)
            optimizer.step()
        after(number)
        return list(model.parameters())

    def save(number: int) -> None:
        if number == 0:
            ps.save(folder)

    first = new_cluster(2, 2, updater_of=updater_of, folder="first")
    in_threads(*[partial(work, first, number, 0, SAVED, save) for number in range(2)])
    second = new_cluster(servers, 2, updater_of=updater_of, folder="second")
    found = in_threads(
        *[partial(work, second, number, SAVED, LAST, lambda _: None) for number in range(2)]
    )
    for weights in found:
        same(weights, train_in_one(kind))


def same(weights: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    for one, other in zip(weights, wanted, strict=True):
        assert torch.equal(one, other), (one - other).abs().max()


def check_rows(new_cluster: NewCluster, folder: Path, of_thread: Any) -> None:
    """Go on with rows that have slots, on other numbers of servers; compare with those of 2."""

    def updater_of(described: TableDescription) -> Any:
        optimizer = torch.optim.Adam([nn.Parameter(torch.zeros(1))], lr=0.1)
        return TorchRows(new_store(described), optimizer, optimizer.param_groups[0])

    def push(step: int) -> None:
        made = torch.Generator().manual_seed(step)
        ids = torch.randperm(40, generator=made)[:12]
        ps.push_rows("embedding", ids, torch.randn(12, 4, generator=made))

    def begin(servers: int, name: str) -> None:
        cluster = new_cluster(servers, 1, updater_of=updater_of, folder=name)
        of_thread.worker = worker = cluster.worker("worker 0")
        spec = RowsSpec(40, 4, seed=2)
        options = TableOptions("sync", None, rows=spec.fields)
        worker.declare_rows(TensorSpec("embedding", "float32", (40, 4)), options)

    begin(2, "first")
    for step in range(SAVED):
        push(step)
    ps.save(folder)
    for step in range(SAVED, LAST):
        push(step)
    wanted = ps.pull_rows("embedding", torch.arange(40))
    for servers in (4, 3, 1):
        begin(servers, f"with {servers}")
        assert ps.load(folder) == SAVED
        for step in range(SAVED, LAST):
            push(step)
        assert torch.equal(ps.pull_rows("embedding", torch.arange(40)), wanted)
