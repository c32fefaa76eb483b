"""Rows of embeddings on servers that step with optimizers of PyTorch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdlite.ps.context import new_store
from hvdlite.ps.layouts.blocks import Array, TensorSpec
from hvdlite.ps.scheduler.registry import TableOptions
from hvdlite.ps.tables.clocks import SYNC
from hvdlite.ps.tables.description import TableDescription
from hvdlite.ps.tables.row_store import RowsSpec, RowStore, first_rows
from hvdlite.ps.worker.remote_rows import RemoteRows
from hvdlite.ps.worker.worker import Worker
from hvdlite.torch import ps
from hvdlite.torch.ps.embedding import ROWS as ATTRIBUTE
from hvdlite.torch.ps.embedding import PulledRows
from hvdlite.torch.ps.updater import TorchRows
from tests.ps.cluster import NewCluster, in_threads, wait_until

COUNT = 256  # A table in one process has no elements that PyTorch rounds in another way.
SPEC = RowsSpec(COUNT, 3, seed=5)
Optimizers = Callable[..., torch.optim.Optimizer]


def pushed(step: int) -> tuple[Array, Array]:
    made = np.random.default_rng(step)
    ids = np.unique(made.integers(0, COUNT, 60))
    return ids, made.normal(size=(len(ids), 3)).astype(np.float32)


class Servers:
    """Rows on some servers, each with an optimizer of its own."""

    def __init__(self, count: int, new: Optimizers) -> None:
        self.updaters = []
        for _ in range(count):
            optimizer = new([nn.Parameter(torch.empty(0, 3))])
            group = optimizer.param_groups[0]
            self.updaters.append(TorchRows(RowStore("e", SPEC), optimizer, group))
        for updater in self.updaters:
            updater.begin([])

    def step(self, step: int, numbers: Any = ()) -> None:
        ids, rows = pushed(step)
        for server, updater in enumerate(self.updaters):
            own = ids % len(self.updaters) == server
            updater.step([ids[own], rows[own]], numbers)

    def rows(self) -> Array:
        found = np.empty((COUNT, 3), np.float32)
        for server, updater in enumerate(self.updaters):
            ids = np.arange(server, COUNT, len(self.updaters))
            found[ids] = updater.take(ids)
        return found


def table_in_one(new: Optimizers, steps: int, *, sparse: bool) -> Array:
    """Return what the optimizer makes of the whole table in one process."""
    parameter = nn.Parameter(torch.tensor(first_rows(SPEC, "e", np.arange(COUNT))))
    optimizer = new([parameter])
    for step in range(steps):
        ids, rows = (torch.tensor(each) for each in pushed(step))
        gradient = torch.sparse_coo_tensor(ids[None], rows, (COUNT, 3), check_invariants=True)
        parameter.grad = gradient if sparse else gradient.to_dense()
        optimizer.step()
    found: Array = parameter.detach().numpy()
    return found


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize(
    ("new", "sparse"),
    [
        (partial(torch.optim.SGD, lr=0.1), False),
        (partial(torch.optim.SparseAdam, lr=0.1), True),
        (partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3), False),
    ],
)
def test_steps_are_bitwise_those_of_one_process(
    servers: int, new: Optimizers, sparse: bool
) -> None:
    made = Servers(servers, new)
    for step in range(8):
        made.step(step)
    np.testing.assert_array_equal(made.rows(), table_in_one(new, 8, sparse=sparse))


@pytest.mark.parametrize("servers", [1, 2])
def test_momenta_of_rows_that_are_not_pushed_wait(servers: int) -> None:
    new = partial(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9))
    made = Servers(servers, new)
    wanted = first_rows(SPEC, "e", np.arange(COUNT)).astype(np.float64)
    mean, square = np.zeros((COUNT, 3)), np.zeros((COUNT, 3))
    for step in range(12):
        made.step(step)
        ids, rows = pushed(step)
        mean[ids] = 0.8 * mean[ids] + 0.2 * rows
        square[ids] = 0.9 * square[ids] + 0.1 * rows.astype(np.float64) ** 2
        count = step + 1  # of all steps, whatever rows they push
        divisor = np.sqrt(square[ids] / (1 - 0.9**count)) + 1e-8
        wanted[ids] -= 0.1 * mean[ids] / (1 - 0.8**count) / divisor
    np.testing.assert_allclose(made.rows(), wanted, rtol=2e-5, atol=1e-6)


def test_hyperparameters_come_with_a_push() -> None:
    made = Servers(2, partial(torch.optim.SGD, lr=9.0))
    made.step(0, [{"lr": 0.5}])
    made.step(1)
    slow = partial(torch.optim.SGD, lr=0.5)
    assert made.rows().tobytes() == table_in_one(slow, 2, sparse=False).tobytes()


@pytest.mark.parametrize(
    "new",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9),
        partial(torch.optim.Adam, lr=0.1),
        partial(torch.optim.SparseAdam, lr=0.1),
        partial(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.3),
        partial(torch.optim.Rprop, lr=0.1),
    ],
)
def test_rows_go_on_after_a_snapshot(new: Optimizers) -> None:
    undisturbed, made = Servers(2, new), Servers(2, new)
    for step in range(4):
        undisturbed.step(step)
        made.step(step)
    again = Servers(2, new)
    for before, updater in zip(made.updaters, again.updaters, strict=True):
        updater.begin([array.copy() for array in before.values()])
        updater.load({key: array.copy() for key, array in before.state().items()})
    for step in range(4, 8):
        undisturbed.step(step)
        again.step(step)
    assert again.rows().tobytes() == undisturbed.rows().tobytes()


def test_state_that_is_not_of_single_elements_is_refused() -> None:
    class Rank1(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter]["row_var"] = torch.zeros(7)

    with pytest.raises(ValueError, match=r"Rank1 keeps 'row_var' of shape \(7,\) for \d+ elements"):
        Servers(1, partial(Rank1, lr=0.1)).step(0)


def test_what_cannot_begin_on_servers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"give the nn\.Embedding instead of its weight"):
        ps.set_param_ps(nn.Embedding(3, 2).weight, init_in_server=True)
    with pytest.raises(ValueError, match=r"no nn\.Embedding in Linear"):
        ps.set_param_ps(nn.Linear(3, 2), init_in_server=True)
    with pytest.raises(ValueError, match="with max_norm changes rows"):
        ps.set_param_ps(nn.Embedding(3, 2, max_norm=1.0), init_in_server=True)
    embedding = nn.Embedding(2**40, 64, device="meta")
    model = nn.Sequential(embedding)
    ps.set_param_ps(model, init_in_server=True)
    assert (tuple(embedding.weight.shape), embedding.num_embeddings) == ((0, 64), 2**40)
    with pytest.raises(ValueError, match=r"make ps\.DistributedOptimizer"):
        model(torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("servers", [1, 3])
def test_a_server_without_rows_goes_on_after_a_snapshot(servers: int) -> None:
    """Few ids are in use, or there are more servers than rows."""
    new = partial(torch.optim.Adam, lr=0.1)
    made, again = Servers(servers, new), Servers(servers, new)
    for updater, after in zip(made.updaters, again.updaters, strict=True):
        updater.step([np.zeros(0, np.int64), np.zeros((0, 3), np.float32)], [])
        after.begin([array.copy() for array in updater.values()])
        after.load({key: array.copy() for key, array in updater.state().items()})
    for step in range(3):
        made.step(step)
        again.step(step)
    assert again.rows().tobytes() == made.rows().tobytes()


class Kept:
    """A table of rows in this process, in place of one on servers."""

    def __init__(self, values: Array) -> None:
        self._values = values

    def pull(self, ids: Array) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: self._values[ids])


def served(embedding: nn.Embedding) -> tuple[nn.Embedding, PulledRows]:
    """The embedding with rows that are pulled, which have the values of its weight."""
    values = embedding.weight.detach().numpy().copy()
    ps.set_param_ps(embedding, init_in_server=True)
    rows: PulledRows = getattr(embedding.weight, ATTRIBUTE)
    rows.table = cast("Any", Kept(values))
    return embedding, rows


BATCHES = torch.tensor([[3, 1, 1, 7], [7, 0, 3, 3]])


def backward(embedding: nn.Embedding, times: float = 1.0) -> None:
    for batch in BATCHES:
        found = embedding(batch)
        (times * (found * torch.arange(found.numel()).view(found.shape)).sum()).backward()


@pytest.mark.parametrize("clips", [False, True])
def test_gradients_of_rows_are_unscaled_and_clipped(clips: bool) -> None:
    plain = nn.Embedding(8, 3)
    own, rows = served(copy.deepcopy(plain))
    for embedding in (plain, own):
        optimizer = torch.optim.SGD(embedding.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        backward(embedding, 1024.0)
        scaler.scale(torch.ones(()))
        scaler.unscale_(optimizer)
        if clips:
            nn.utils.clip_grad_norm_(embedding.parameters(), 0.5)
    ids, gradients = rows.take(None)
    assert plain.weight.grad is not None and ids.tolist() == [0, 1, 3, 7]
    np.testing.assert_allclose(gradients, plain.weight.grad[ids].numpy(), rtol=1e-6)
    assert tuple(own.weight.shape) == (0, 3) and own.weight.grad is None
    assert rows.take(None)[1].shape == (0, 3)


def test_an_overflow_of_rows_alone_is_found() -> None:
    embedding, _ = served(nn.Embedding(8, 3))
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    backward(embedding, math.inf)
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradients_of_rows_are_forgotten_with_those_of_the_model(set_to_none: bool) -> None:
    embedding, rows = served(nn.Embedding(8, 3))
    backward(embedding)
    embedding.zero_grad(set_to_none)
    embedding(torch.tensor([5])).sum().backward()
    ids, gradients = rows.take(torch.tensor(2.0))
    known = {int(each): row.tolist() for each, row in zip(ids, gradients, strict=True)}
    assert known.pop(5) == [0.5] * 3
    assert set_to_none is not bool(known) and not np.any([*known.values()])


def test_a_frozen_embedding_keeps_no_gradients() -> None:
    embedding, rows = served(nn.Embedding(8, 3))
    embedding.weight.requires_grad_(False)
    assert not embedding(BATCHES).requires_grad
    assert len(rows.take(None)[0]) == 0


def test_an_embedding_with_a_forward_of_its_own_keeps_it() -> None:
    class Scaled(nn.Embedding):
        def forward(self, input: Tensor) -> Tensor:
            return 10 * super().forward(input)

    plain = Scaled(8, 3)
    own, _ = served(copy.deepcopy(plain))
    assert isinstance(own, Scaled) and type(own).__name__ == "Scaled"
    assert torch.equal(own(BATCHES), plain(BATCHES))


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_embeddings_that_share_a_weight_share_their_rows(device: str) -> None:
    one, other = nn.Embedding(8, 3, device=device), nn.Embedding(8, 3, device=device)
    other.weight = one.weight
    model = nn.ModuleList([one, other])
    ps.set_param_ps(model, init_in_server=True)
    assert one.weight is other.weight and len([*model.parameters()]) == 1
    padded = nn.Embedding(8, 3, padding_idx=2, device=device)
    whole = nn.Embedding(8, 3, device=device)
    padded.weight = whole.weight
    with pytest.raises(ValueError, match="padding_idx is 2 in one and None in the other"):
        ps.set_param_ps(nn.ModuleList([padded, whole]), init_in_server=True)


# -- servers come, go and are killed


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


@pytest.mark.thorough
@pytest.mark.parametrize("kind", OPTIMIZERS)
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


@pytest.mark.thorough
def test_a_server_killed_while_rows_move_begins_the_change_again(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2, 2, every=1, updater_of=partial(updater_of, "adam"))
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
    assert [each.tobytes() for each in found] == [wanted("adam", 12)] * 2
