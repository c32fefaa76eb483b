"""An optimizer of PyTorch whose servers have gone back: the next step begins with their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

from hvdlite.ps import context  # noqa: E402
from hvdlite.ps.tables.description import TableDescription  # noqa: E402
from hvdlite.torch import ps  # noqa: E402
from hvdlite.torch.ps.updater import TorchUpdater  # noqa: E402
from tests.ps.cluster import LIMIT_SECONDS, Cluster  # noqa: E402


def test_a_step_that_raises_a_rollback_reads_the_weights_anew(
    new_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch
) -> None:
    def updater_of(described: TableDescription) -> TorchUpdater:
        server = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], 0.5)
        return TorchUpdater(server, described, whole=False)

    worker = new_cluster(1, 1, updater_of=updater_of).worker("worker 0", 0)
    monkeypatch.setattr(context, "role", lambda: "worker")
    monkeypatch.setattr(context, "worker", lambda: worker)
    settings = type("Settings", (), {"independent": True})
    monkeypatch.setattr(context, "current", lambda: type("Context", (), {"settings": settings}))
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = ps.DistributedOptimizer(torch.optim.SGD([weight], 0.5), [("weight", weight)])
    for _ in range(2):
        weight.grad = torch.ones(4)
        optimizer.step()
    assert weight.tolist() == [-1.0] * 4
    with torch.no_grad():
        weight.fill_(7.0)  # As it was after the steps that are lost.
    table, gone = optimizer._table, threading.Event()
    error = ps.PsRolledBack("server 0 goes on from step 1", 1)
    table._client.call(lambda: (table._go_back(error), gone.set()))
    assert gone.wait(LIMIT_SECONDS)
    with pytest.raises(ps.PsRolledBack, match="from step 1"):
        optimizer.step()
    assert weight.tolist() == [-0.5] * 4
    assert optimizer.finished_steps == 1
