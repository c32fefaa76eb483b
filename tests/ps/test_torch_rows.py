"""Rows of embeddings on servers that step with optimizers of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hvdlite.ps.layouts.blocks import Array
from hvdlite.ps.tables.row_store import RowsSpec, RowStore, first_rows
from hvdlite.torch import ps
from hvdlite.torch.ps.updater import TorchRows
from tests.ps.processes import cluster
from tests.ps.scripts.torch_rows import ROWS, WIDTH, main, train_in_one
from tests.ps.sites import Site

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


@pytest.mark.parametrize(("name", "servers"), [("sgd", 2), ("sparse_adam", 1)])
def test_a_recommender_is_bitwise_one_process(site: Site, name: str, servers: int) -> None:
    with cluster(site, servers, 2, main, name, 12) as job:
        assert not job.wait("worker0")
        assert not job.wait_for_all()
    wanted: dict[str, Tensor] = train_in_one(name, 2, 12)
    for worker in range(2):
        found = job.weights(worker)
        assert found["rows"].shape == (ROWS, WIDTH)
        assert {key for key in wanted if not torch.equal(found[key], wanted[key])} == set()
