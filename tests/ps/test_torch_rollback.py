"""An optimizer of PyTorch whose servers have gone back: the next step begins with their weights."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hvdlite.ps import context  # noqa: E402
from hvdlite.ps.tables.description import TableDescription  # noqa: E402
from hvdlite.ps.tables.updater import Updater  # noqa: E402
from hvdlite.torch import ps  # noqa: E402
from hvdlite.torch.ps.updater import TorchRows, TorchUpdater  # noqa: E402
from tests.ps.cluster import LIMIT_SECONDS, Cluster  # noqa: E402

Trains = Callable[[float], tuple[Any, Any, Any]]


@pytest.fixture
def trains(new_cluster: Callable[..., Cluster], monkeypatch: pytest.MonkeyPatch) -> Trains:
    """What makes a weight, rows beside it, and their optimizer with this rate, after two steps."""

    def updater_of(described: TableDescription) -> Updater:
        server = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4))], 0.5)
        if described.rows is not None:
            return TorchRows(context.new_store(described), server, server.param_groups[0])
        return TorchUpdater(server, described, whole=False)

    worker = new_cluster(1, 1, updater_of=updater_of).worker("worker 0", 0)
    monkeypatch.setattr(context, "role", lambda: "worker")
    monkeypatch.setattr(context, "worker", lambda: worker)
    settings = type("Settings", (), {"independent": True})
    monkeypatch.setattr(context, "current", lambda: type("Context", (), {"settings": settings}))

    def make(rate: float) -> tuple[Any, Any, Any]:
        weight = torch.nn.Parameter(torch.zeros(4))
        embedding = torch.nn.Embedding(10, 4)
        ps.set_param_ps(embedding, init_in_server=True)
        named = [("weight", weight), ("rows", embedding.weight)]
        plain = torch.optim.SGD([weight, embedding.weight], rate)
        optimizer = ps.DistributedOptimizer(plain, named, parameters=["*"])
        for _ in range(2):
            step(weight, embedding, optimizer)
        return weight, embedding, optimizer

    return make


def step(weight: Any, embedding: Any, optimizer: Any) -> float:
    """Make a step with gradients of one; return how far the weight went."""
    before = weight[0].item()
    optimizer.zero_grad()
    (embedding(torch.tensor([1])).sum() + weight.sum()).backward()
    optimizer.step()
    return before - weight[0].item()


def lose_step(optimizer: Any) -> None:
    """Let servers go back from the second step to the first one."""
    table, gone = optimizer._table, threading.Event()
    error = ps.PsRolledBack("server 0 goes on from step 1", 1)
    table._client.call(lambda: (table._go_back(error), gone.set()))
    assert gone.wait(LIMIT_SECONDS)


@pytest.mark.parametrize("what", ["step", "save", "rows"])
def test_whatever_raises_a_rollback_reads_the_weights_anew(
    what: str, trains: Trains, tmp_path: Path
) -> None:
    weight, embedding, optimizer = trains(0.5)
    assert weight.tolist() == [-1.0] * 4
    with torch.no_grad():
        weight.fill_(7.0)  # As it was after the steps that are lost.
    call = {
        "step": optimizer.step,
        "save": lambda: context.save(tmp_path / "saved"),
        "rows": lambda: embedding(torch.tensor([1])),
    }[what]
    lose_step(optimizer)
    with pytest.raises(ps.PsRolledBack, match="from step 1"):
        call()
    assert weight.tolist() == [-0.5] * 4
    assert optimizer.finished_steps == 1
    if what != "step":
        optimizer.zero_grad()
    assert step(weight, embedding, optimizer) == 0.5, "it hears of it once"


def test_servers_hear_of_a_rate_whose_step_was_lost(trains: Trains) -> None:
    """Those that have lost nothing drop the step that is made again, and what it says."""
    weight, embedding, optimizer = trains(0.5)
    optimizer.param_groups[0]["lr"] = 0.125
    lose_step(optimizer)
    with pytest.raises(ps.PsRolledBack):
        step(weight, embedding, optimizer)
    moves = [step(weight, embedding, optimizer) for _ in range(3)]
    assert moves == [0.5, 0.125, 0.125]  # The first one was made before.
