"""Rows with the state of an optimizer of PyTorch, while servers come, go and are killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from hvdlite.ps.context import new_store
from hvdlite.ps.layouts.blocks import TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.worker import Worker
from hvdlite.torch.ps.updater import TorchRows
from tests.ps.cluster import Cluster, in_threads, wait_until
from tests.ps.test_torch_rows import COUNT, SPEC, Servers, pushed

NewCluster = Callable[..., Cluster]
OPTIMIZERS = {
    "adam": partial(torch.optim.Adam, lr=0.1),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
}
EVERY = np.arange(COUNT)


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=OPTIMIZERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def updater_of(kind: str, described: TableDescription) -> Any:
    optimizer = OPTIMIZERS[kind]([nn.Parameter(torch.zeros(1))])
    return TorchRows(new_store(described), optimizer, optimizer.param_groups[0])


def declared(worker: Worker) -> RemoteRows:
    options = TableOptions(SYNC, None, average=False, rows=SPEC.fields)
    return worker.declare_rows(TensorSpec("e", "float32", (COUNT, 3)), options)


def half(step: int, number: int) -> tuple[Any, Any]:
    """Return what one of two workers pushes: the other one has the other rows."""
    ids, rows = pushed(step)
    own = ids % 5 < 2 if number == 0 else ids % 5 >= 2
    return ids[own], rows[own]


def train(rows: RemoteRows, number: int, steps: range) -> None:
    for step in steps:
        rows.push(*half(step, number))
        rows.pull(EVERY[:3]).wait()


def wanted(kind: str, steps: int) -> bytes:
    alone = Servers(1, OPTIMIZERS[kind])
    for step in range(steps):
        alone.step(step)
    return bytes(alone.rows().tobytes())


def test_rows_and_their_state_survive_servers_that_come_go_and_are_killed(
    new_cluster: NewCluster, kind: str
) -> None:
    cluster = new_cluster(2, 2, every=1, updater_of=partial(updater_of, kind))
    workers = in_threads(*[partial(cluster.worker, f"worker {n}", n) for n in range(2)])
    tables = in_threads(*[partial(declared, worker) for worker in workers])

    def both(steps: range) -> None:
        in_threads(*[partial(train, rows, n, steps) for n, rows in enumerate(tables)])

    def grown(version: int) -> None:
        wait_until(lambda: cluster.state.registry.version == version)

    both(range(4))
    cluster.restart_server(1)
    both(range(4, 8))
    cluster.servers.append(cluster.start_server(2, joins=True))
    both(range(8, 12))
    grown(2)
    for number in (0, 2):
        cluster.restart_server(number)
    both(range(12, 16))
    workers[0].scale_servers(1)
    both(range(16, 20))
    grown(3)
    cluster.restart_server(0)
    both(range(20, 24))
    found = in_threads(*[lambda t=rows: t.pull(EVERY).wait() for rows in tables])
    assert [each.tobytes() for each in found] == [wanted(kind, 24)] * 2


def test_a_server_killed_while_rows_move_begins_the_change_again(
    new_cluster: NewCluster, kind: str
) -> None:
    cluster = new_cluster(2, 2, every=1, updater_of=partial(updater_of, kind))
    workers = in_threads(*[partial(cluster.worker, f"worker {n}", n) for n in range(2)])
    tables = in_threads(*[partial(declared, worker) for worker in workers])
    in_threads(*[partial(train, rows, n, range(4)) for n, rows in enumerate(tables)])
    tables[0].push(*half(4, 0))  # The border cannot be reached before the other has pushed, too.
    cluster.servers.append(cluster.start_server(2, joins=True))
    wait_until(lambda: (c := cluster.state.changes.current) is not None and c.borders is not None)
    identity = cluster.state.changes.current.identity  # type: ignore[union-attr]
    cluster.restart_server(0)
    wait_until(lambda: (c := cluster.state.changes.current) is None or c.identity != identity)
    in_threads(
        lambda: (tables[0].pull(EVERY[:3]).wait(), train(tables[0], 0, range(5, 12))),
        lambda: train(tables[1], 1, range(4, 12)),
    )
    wait_until(lambda: cluster.state.registry.version == 2)
    found = in_threads(*[lambda t=rows: t.pull(EVERY).wait() for rows in tables])
    assert [each.tobytes() for each in found] == [wanted(kind, 12)] * 2
