"""DistributedOptimizer: parameters without gradients, sparse ones, those that come and go."""

from __future__ import annotations

import copy
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks
from tests.torch.small_net import (
    SIZE,
    Tensor,
    data,
    flat,
    gradients,
    loss_of,
    net,
    reduced_gradients,
    sgd,
)


class Forked(nn.Module):
    """Two heads, of which a rank may use one; one is used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.even, self.odd, self.unused = (nn.Linear(3, 2) for _ in range(3))

    def forward(self, inputs: Tensor, head: int) -> Tensor:
        return (self.odd if head % 2 else self.even)(inputs)


@pytest.mark.parametrize("groups", [None, 2])
def test_parameters_without_a_gradient_on_some_ranks(groups: int | None) -> None:
    models = [Forked() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.5),
            model.named_parameters(),
            groups=groups,
        )
        for step in range(3):
            optimizer.zero_grad()
            model(data(rank, step), head=rank + step).sum().backward()
            optimizer.step()

    run_ranks(SIZE, main)
    alone = Forked()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0, weight_decay=0.5)
    for step in range(3):
        optimizer.zero_grad()
        for rank in range(SIZE):
            (alone(data(rank, step), head=rank + step).sum() / SIZE).backward()
        optimizer.step()
    for model in models:
        assert torch.equal(flat(model), flat(models[0]))
    torch.testing.assert_close(flat(models[0]), flat(alone), rtol=1e-4, atol=1e-5)


def test_a_parameter_that_is_used_twice() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    start = flat(layers[0])

    def main(rank: int) -> None:
        layer = layers[rank]
        optimizer = hvd.DistributedOptimizer(sgd(layer), layer.named_parameters())
        layer(layer(data(rank))).sum().backward()
        optimizer.step()

    run_ranks(2, main)
    alone = nn.Linear(3, 3)
    nn.utils.vector_to_parameters(start, alone.parameters())
    sum(alone(alone(data(rank))).sum() for rank in range(2)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(start - flat(layers[0]), gradients(alone) / 2)


def embedding(sparse: bool) -> nn.Embedding:
    torch.manual_seed(4)
    return nn.Embedding(6, 2, sparse=sparse)


@pytest.mark.parametrize("groups", [None, 1])
@pytest.mark.parametrize("as_dense", [False, True])
@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_gradients(as_dense: bool, op: str, groups: int | None) -> None:
    tables = [embedding(sparse=True) for _ in range(SIZE)]
    words = [[[0, 1], [1, 1]], [[5]], []]

    def main(rank: int) -> None:
        table = tables[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(table), table.named_parameters(), op=getattr(hvd, op), sparse_as_dense=as_dense,
            groups=groups,
        )  # fmt: skip
        for _ in range(2):
            optimizer.zero_grad()
            if words[rank]:  # no gradient at all on the last rank
                sum(table(torch.tensor(row)).sum() for row in words[rank]).backward()
            optimizer.step()
            assert table.weight.grad is not None
            assert table.weight.grad.is_sparse

    run_ranks(SIZE, main)
    alone = embedding(sparse=False)
    for row in [row for rows in words for row in rows]:
        alone(torch.tensor(row)).sum().backward()
    assert alone.weight.grad is not None
    expected = 2 * alone.weight.grad / (SIZE if op == "Average" else 1)
    for table in tables:
        torch.testing.assert_close(alone.weight - table.weight, expected, rtol=1e-5, atol=1e-5)
        assert torch.equal(table.weight, tables[0].weight)


def test_a_gradient_that_is_sparse_on_one_rank_and_dense_on_another() -> None:
    tables = [embedding(sparse=bool(rank)) for rank in range(2)]

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(sgd(tables[rank]), tables[rank].named_parameters())
        tables[rank](torch.tensor([1])).sum().backward()
        with pytest.raises(hvd.HorovodInternalError, match="sparse on others"):
            optimizer.step()

    run_ranks(2, main)


def test_a_process_set_shares_gradients_among_its_members_only() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> Tensor:
        model = models[rank]
        pair = hvd.add_process_set([0, 1])
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), process_set=pair)
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.step()
        hvd.barrier()
        return before - flat(model)

    changes = run_ranks(SIZE, main)
    torch.testing.assert_close(changes[0], reduced_gradients(size=2), rtol=1e-5, atol=1e-5)
    assert torch.equal(changes[0], changes[1])
    alone = net()
    loss_of(alone, 2).backward()
    torch.testing.assert_close(changes[2], gradients(alone), rtol=1e-5, atol=1e-5)


def test_parameters_that_come_or_thaw_later_are_synchronized() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        model[0].bias.requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model[0].parameters(), lr=1.0), model.named_parameters()
        )
        model[0].bias.requires_grad_(True)
        optimizer.add_param_group({"params": list(model[2].parameters())})
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.step()
        torch.testing.assert_close(
            before - flat(model), reduced_gradients(size=2), rtol=1e-5, atol=1e-5
        )

    run_ranks(2, main)


KINDS: list[dict[str, Any]] = [
    {}, {"groups": 1}, {"gradient_as_bucket_view": True}, {"shard_state": True}
]  # fmt: skip


def assign_groups(model: Any, optimizer: Any) -> None:
    first = optimizer.param_groups[0]
    added = {**first, "params": list(model[2].parameters()), "lr": 0.002}
    optimizer.param_groups = [{**first, "params": [model[0].weight]}, added]


def regroup(model: Any, optimizer: Any) -> None:
    assign_groups(model, optimizer)
    groups = optimizer.param_groups
    groups[1]["params"].append(groups[0]["params"].pop())


def replace_a_layer(model: Any, optimizer: Any) -> None:
    model[0] = copy.deepcopy(model[0])
    for group, new in zip(optimizer.param_groups, model[0].parameters(), strict=True):
        group["params"][:] = [new]


def delete_and_add(model: Any, optimizer: Any) -> None:
    del optimizer.param_groups[0]
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 0.002})


CHANGES = [assign_groups, regroup, replace_a_layer, delete_and_add]


@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_groups_that_change_meanwhile(change: Callable[..., None], options: dict[str, Any]) -> None:
    """The parameters are named by their positions, at which others are later."""
    models = [net() for _ in range(2)]

    def train(model: nn.Module, optimizer: Any, ranks: list[int]) -> None:
        for step in range(8):
            if step == 4:
                change(model, optimizer)
            optimizer.zero_grad()
            (sum(loss_of(model, rank, step) for rank in ranks) / len(ranks)).backward()
            optimizer.step()

    def made(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([{"params": [each]} for each in model[0].parameters()], lr=0.01)

    def main(rank: int) -> None:
        train(models[rank], hvd.DistributedOptimizer(made(models[rank]), **options), [rank])

    run_ranks(2, main)
    alone = net()
    train(alone, made(alone), [0, 1])
    for model in models:
        torch.testing.assert_close(flat(model), flat(alone), rtol=1e-4, atol=1e-4)


def test_a_parameter_that_was_frozen_later_stays_as_it_is() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1), model.named_parameters()
        )
        loss_of(model, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
        model[0].weight.requires_grad_(False)
        before = model[0].weight.clone()
        loss_of(model, rank, 1).backward()
        optimizer.step()
        assert torch.equal(model[0].weight, before)

    run_ranks(2, main)


@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_new_optimizer_takes_over_from_one_that_was_thrown_away(options: dict[str, Any]) -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        for step in range(6):
            if step % 3 == 0:
                optimizer = hvd.DistributedOptimizer(
                    sgd(model), model.named_parameters(), **options
                )
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 3 == 2:
                reference = weakref.ref(optimizer)
                del optimizer
                assert reference() is None, "it waits for the garbage collector"

    run_ranks(2, main)
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_models_can_be_copied_and_saved_and_optimizers_say_why_not() -> None:
    model = net()

    def main(rank: int) -> None:
        if rank == 0:
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
            copied = copy.deepcopy(model)
            copied(data(0)).sum().backward()
            assert not optimizer._exchange.busy, "the copy is not watched"
            torch.save(model, io.BytesIO())
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                copy.deepcopy(optimizer)

    run_ranks(2, main)


@pytest.mark.parametrize("groups", [None, 2])
def test_a_rank_with_less_data_joins(groups: int | None) -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> Tensor:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model, 0.1), model.named_parameters(), groups=groups
        )
        for step in range(rank):  # none on rank 0
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            optimizer.step()
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=SIZE - 1)
        return flat(model)

    weights = run_ranks(SIZE, main)
    alone = net()
    optimizer = sgd(alone, 0.1)
    for step in range(SIZE - 1):
        optimizer.zero_grad()
        for rank in range(step + 1, SIZE):
            (loss_of(alone, rank, step) / SIZE).backward()
        optimizer.step()
    torch.testing.assert_close(weights[0], flat(alone), rtol=1e-5, atol=1e-5)


def test_load_state_dict_starts_afresh() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5),
            model.named_parameters(),
            backward_passes_per_step=2,
        )
        loss_of(model, rank).backward()
        optimizer.load_state_dict(optimizer.state_dict())
        for step in range(2):
            loss_of(model, rank, step).backward()
        optimizer.step()

    run_ranks(2, main)
    assert torch.equal(flat(models[0]), flat(models[1]))
