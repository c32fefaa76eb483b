"""DistributedOptimizer: what travels, when, and what is refused."""

from __future__ import annotations

import copy
import io
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.base.topology import Topology
from hvdlite.common.gradients.batches import CROWDED, ENOUGH_BYTES, enough_bytes
from hvdlite.common.runtime.state import current
from hvdlite.torch import gradient_exchange as exchange
from tests.ranks import run_ranks

SIZE = 3
Tensor = torch.Tensor


torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def net() -> nn.Sequential:
    """A new copy: torch has one random generator for all threads."""
    return copy.deepcopy(NET)


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + rank))


def loss_of(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    return model(data(rank, step)).square().sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None])


def reduced_gradients(op: str = "Average", size: int = SIZE, passes: int = 1) -> Tensor:
    """The oracle: every rank's gradients, computed in one process and combined."""
    rows = []
    for rank in range(size):
        model = net()
        for step in range(passes):
            loss_of(model, rank, step).backward()
        rows.append(gradients(model))
    stacked = torch.stack(rows)
    if op == "Average":
        return stacked.mean(0)
    return stacked.sum(0) if op == "Sum" else stacked.amax(0) if op == "Max" else stacked.amin(0)


def check_one_step(op: str = "Average", tolerance: float = 1e-6, **options: Any) -> None:
    """One step of SGD with a learning rate of 1 is the reduced gradient itself."""
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        if "groups" in options and callable(options["groups"]):
            chosen = {**options, "groups": options["groups"](model)}
        else:
            chosen = options
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), op=getattr(hvd, op), **chosen
        )
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.step()
        expected = reduced_gradients(op)
        torch.testing.assert_close(
            before - flat(model), expected, rtol=tolerance, atol=tolerance * expected.abs().max()
        )

    run_ranks(SIZE, main)
    for model in models[1:]:
        assert torch.equal(flat(model), flat(models[0]))


@pytest.mark.parametrize("op", ["Average", "Sum", "Min", "Max"])
def test_one_step_applies_the_reduced_gradients(op: str) -> None:
    check_one_step(op, tolerance=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_predivide_factor": 2.5},
        {"groups": 2},
        {"groups": 1},
        {"groups": 100},
        {"groups": lambda model: [[model[0].weight, model[2].bias], [model[0].bias]]},
        {"groups": 2, "gradient_predivide_factor": 2.5},
        {"groups": 2, "compression": hvd.Compression.none, "sparse_as_dense": True},
    ],
    ids=str,
)
def test_options_that_do_not_change_the_result(options: dict[str, Any]) -> None:
    check_one_step(tolerance=1e-5, **options)


@pytest.mark.parametrize(("compression", "tolerance"), [("fp16", 2e-3), ("bf16", 2e-2)])
@pytest.mark.parametrize("groups", [None, 2])
def test_compression(compression: str, tolerance: float, groups: int | None) -> None:
    check_one_step(
        tolerance=tolerance, compression=getattr(hvd.Compression, compression), groups=groups
    )


class _Halved(hvd.Compression.fp16):  # type: ignore[misc, name-defined]
    """A compression of the user's own that is built on ours."""

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        return super().compress(tensor * 0.5)

    @staticmethod
    def decompress(tensor: Tensor, ctx: Any) -> Tensor:
        return tensor.to(ctx) * 2 + 1


@pytest.mark.parametrize("compression", [_Halved, _Halved()], ids=["class", "instance"])
def test_a_compression_built_on_ours_is_asked(compression: Any) -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=compression
        )
        loss_of(model, rank).backward()
        optimizer.synchronize()
        expected = reduced_gradients(size=2) + 1
        torch.testing.assert_close(gradients(model), expected, rtol=2e-3, atol=2e-3)

    run_ranks(2, main)


def test_gradients_of_the_compressed_type_travel_as_they_are() -> None:
    models = [net().to(torch.bfloat16) for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=hvd.Compression.bf16
        )
        for step in range(2):
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, float(rank + 2 * step))
            given = [parameter.grad for parameter in model.parameters()]
            optimizer.synchronize()
            for parameter, gradient in zip(model.parameters(), given, strict=True):
                assert parameter.grad is gradient
                assert (gradient == 0.5 + 2 * step).all()

    run_ranks(2, main)


class _Picky(hvd.Compression.none):  # type: ignore[misc, name-defined]
    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Any]:
        if tensor.shape == (4,):
            raise TypeError("no biases of 4")
        return tensor, None


def test_a_gradient_that_is_refused_holds_up_no_other() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=_Picky
        )
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(rank))
        with pytest.raises(TypeError, match="no biases of 4"):
            optimizer.synchronize()
        for parameter in model.parameters():
            expected = float(rank) if parameter.shape == (4,) else 0.5
            assert parameter.grad is not None and (parameter.grad == expected).all()

    run_ranks(2, main)


def test_the_class_is_the_wrapped_one_and_state_and_options_are_kept() -> None:
    model = net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss_of(model, 0).backward()
    inner.step()
    scheduler = torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 0.1**epoch)
    inner.step()

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        assert type(optimizer).__name__ == "SGD"
        assert isinstance(optimizer, torch.optim.SGD)
        assert type(optimizer) is not torch.optim.SGD
        assert optimizer.defaults["momentum"] == 0.9
        assert all("momentum_buffer" in state for state in optimizer.state.values())
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
        assert set(optimizer._parameter_names.values()) == {
            "0.weight", "0.bias", "2.weight", "2.bias",
        }  # fmt: skip
        unnamed = hvd.DistributedOptimizer(sgd(net()))
        assert next(iter(unnamed._parameter_names.values())) == "allreduce.noname.0.0"

    run_ranks(1, main)


def test_the_step_hooks_of_the_user_are_called_once_with_reduced_gradients() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(sgd(models[rank]), models[rank].named_parameters())
        seen: list[Tensor] = []
        optimizer.register_step_pre_hook(lambda *_: seen.append(gradients(models[rank])))
        loss_of(models[rank], rank).backward()
        optimizer.step()
        assert len(seen) == 1
        torch.testing.assert_close(seen[0], reduced_gradients())

    run_ranks(SIZE, main)


def test_a_learning_rate_scheduler_on_the_wrapped_optimizer() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
        loss_of(model, rank).backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.5
        optimizer.zero_grad()
        before = flat(model)
        loss_of(model, rank, 1).backward()
        optimizer.step()
        torch.testing.assert_close(before - flat(model), 0.5 * gradients(model))

    run_ranks(SIZE, main)
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize("passes", [2, 3])
@pytest.mark.parametrize("groups", [None, 2])
def test_backward_passes_per_step_accumulate_before_gradients_travel(
    passes: int, groups: int | None
) -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), backward_passes_per_step=passes, groups=groups
        )
        for repetition in range(2):
            for step in range(passes):
                assert not optimizer._exchange.busy
                loss_of(model, rank, step).backward()
            assert optimizer._exchange.busy
            if repetition == 0:
                optimizer.synchronize()
                torch.testing.assert_close(gradients(model), reduced_gradients(passes=passes))
                optimizer.zero_grad()
        with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
            loss_of(model, rank).backward()
        with pytest.raises(RuntimeError, match="was changed after it was sent"):
            optimizer.synchronize()

    run_ranks(SIZE, main)


def test_a_step_after_fewer_passes_than_announced_still_synchronizes() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), backward_passes_per_step=3
        )
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.step()
        torch.testing.assert_close(before - flat(model), reduced_gradients(), rtol=1e-5, atol=1e-5)
        optimizer.zero_grad()
        optimizer.set_backward_passes_per_step(1)
        loss_of(model, rank).backward()
        assert optimizer._exchange.busy
        optimizer.step()

    run_ranks(SIZE, main)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
@pytest.mark.parametrize("size", [1, 2])
def test_the_number_of_passes_can_be_asked_for(op: int, size: int) -> None:
    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(sgd(net()), op=op, backward_passes_per_step=3)
        assert optimizer.backward_passes_per_step == 3
        optimizer.set_backward_passes_per_step(2)
        assert optimizer.backward_passes_per_step == 2
        optimizer.backward_passes_per_step = 4
        assert optimizer.backward_passes_per_step == 4
        with pytest.raises(ValueError, match="backward_passes_per_step"):
            optimizer.set_backward_passes_per_step(0)
        assert optimizer.backward_passes_per_step == 4

    run_ranks(size, main)


def test_clipping_between_synchronize_and_step() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        expected = reduced_gradients()
        expected *= 0.1 / expected.norm()
        torch.testing.assert_close(before - flat(model), expected, rtol=1e-3, atol=1e-6)

    run_ranks(SIZE, main)


def test_step_after_synchronize_warns_and_does_not_sum_twice() -> None:
    models = [net() for _ in range(SIZE)]
    texts: list[str] = []

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Sum)
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.synchronize()
        optimizer.step()
        torch.testing.assert_close(
            before - flat(model), reduced_gradients("Sum"), rtol=1e-5, atol=1e-5
        )

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(SIZE, main)
        texts = [str(each.message) for each in caught]
    assert any("without optimizer.skip_synchronize()" in text for text in texts)


def spoil_by_clipping(model: nn.Module, optimizer: Any) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def spoil_by_replacing(model: nn.Module, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def spoil_by_skipping(model: nn.Module, optimizer: Any) -> None:
    with optimizer.skip_synchronize():
        optimizer.step()


SPOILERS = [spoil_by_clipping, spoil_by_replacing, spoil_by_skipping]


@pytest.mark.parametrize("spoil", SPOILERS)
def test_gradients_of_one_rank_alone_are_never_applied(
    spoil: Callable[[nn.Module, Any], None],
) -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        before = flat(model)
        loss_of(model, rank).backward()
        with pytest.raises(RuntimeError, match=r"synchronize\(\)"):
            spoil(model, optimizer)
        assert torch.equal(flat(model), before)

    run_ranks(2, main)


def test_gradients_that_were_set_by_hand_are_reduced() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(rank))
        before = flat(model)
        optimizer.step()
        torch.testing.assert_close(before - flat(model), torch.full_like(before, 0.5))

    run_ranks(2, main)


def test_gradients_of_other_strides_are_not_taken_for_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are copied when they arrive, which may be long before anybody waits for them."""
    monkeypatch.setattr(exchange, "ENOUGH_BYTES", 0)
    torch.manual_seed(0)
    start = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    models = [copy.deepcopy(start) for _ in range(2)]
    inputs = torch.randn(2, 2, 4, 4).contiguous(memory_format=torch.channels_last)

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        model(inputs[rank : rank + 1]).square().sum().backward()
        hvd.barrier()  # all that was sent before has arrived
        optimizer.step()

    run_ranks(2, main)
    start(inputs).square().sum().div(2).backward()
    sgd(start).step()
    torch.testing.assert_close(flat(models[0]), flat(start))
    assert torch.equal(flat(models[0]), flat(models[1]))


def test_zero_grad_while_gradients_travel() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(sgd(models[rank]), models[rank].named_parameters())
        loss_of(models[rank], rank).backward()
        with pytest.raises(AssertionError, match="race condition"):
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in models[rank].parameters())

    run_ranks(2, main)


def test_a_closure_is_synchronized() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank)
            loss.backward()
            return loss

        before = flat(model)
        loss = optimizer.step(closure)
        torch.testing.assert_close(loss, loss_of(net(), rank))
        torch.testing.assert_close(before - flat(model), reduced_gradients(), rtol=1e-5, atol=1e-5)

    run_ranks(SIZE, main)


def test_lbfgs_takes_the_same_path_on_all_ranks() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.LBFGS(model.parameters(), max_iter=5, line_search_fn="strong_wolfe"),
            model.named_parameters(),
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)

    run_ranks(SIZE, main)
    alone = net()
    optimizer = torch.optim.LBFGS(alone.parameters(), max_iter=5, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((loss_of(alone, rank) for rank in range(SIZE)), torch.zeros(())) / SIZE
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    for model in models:
        assert torch.equal(flat(model), flat(models[0]))
    torch.testing.assert_close(flat(models[0]), flat(alone), rtol=1e-2, atol=1e-3)


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


def test_a_new_optimizer_takes_over_from_one_that_was_thrown_away() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        for step in range(2):
            optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            del optimizer

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


def test_a_failed_reduction_is_raised_and_the_next_step_works() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), op=hvd.Average if rank else hvd.Sum
        )
        loss_of(model, rank).backward()
        with pytest.raises(hvd.HorovodInternalError, match="reduction operation"):
            optimizer.step()
        optimizer.zero_grad()
        other = hvd.DistributedOptimizer(sgd(model), [(f"other.{n}", p) for n, p in
                                                      model.named_parameters()])  # fmt: skip
        del optimizer
        loss_of(model, rank).backward()
        other.step()

    run_ranks(2, main)
    assert torch.equal(flat(models[0]), flat(models[1]))


def make(**options: Any) -> Callable[[nn.Sequential], Any]:
    return lambda model: hvd.DistributedOptimizer(
        sgd(model), **{"named_parameters": model.named_parameters(), **options}
    )


BAD_ARGUMENTS: dict[str, tuple[Callable[[nn.Sequential], Any], str]] = {
    "predivide": (make(gradient_predivide_factor=2.0, op=hvd.Sum), "op != Average"),
    "predivide < 0": (make(gradient_predivide_factor=-2.0), "must be positive"),
    "passes": (make(backward_passes_per_step=0), "must be > 0"),
    "no tuples": (make(named_parameters=["a"]), "sequence of tuples"),
    "groups 0": (make(groups=-1), "groups should be"),
    "groups type": (make(groups="two"), "groups should be"),
    "groups items": (make(groups=[torch.ones(1)]), "lists of torch.Tensor"),
    "groups twice": (
        lambda m: make(groups=[[m[0].weight], [m[0].weight]])(m), "more than once in groups",
    ),
    "groups foreign": (make(groups=[[torch.ones(1)]]), "not a parameter"),
    "duplicates": (
        lambda m: make(named_parameters=[("a", p) for p in m.parameters()])(m), "duplicates: a",
    ),
    "unnamed": (
        lambda m: make(named_parameters=list(m.named_parameters())[1:])(m), r"not named: 0\.0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_arguments_that_are_refused(name: str) -> None:
    build, text = BAD_ARGUMENTS[name]
    model = net()

    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=text):
            build(model)

    run_ranks(1, main)


def test_num_groups_is_deprecated() -> None:
    model = net()

    def main(rank: int) -> None:
        with pytest.warns(DeprecationWarning, match="use groups"):
            make(num_groups=2)(model)

    run_ranks(1, main)


@pytest.mark.parametrize(
    ("hosts", "threads", "cores", "times"),
    [
        ([[0, 1]], 1, 2, CROWDED),
        ([[0, 1]], 1, 3, 1),
        ([[0, 1]], 4, 8, CROWDED),
        ([[0], [1]], 8, 2, 1),
    ],
)
def test_more_gradients_gather_where_the_engine_has_no_core(
    hosts: list[list[int]], threads: int, cores: int, times: int
) -> None:
    topology = Topology(tuple(map(tuple, hosts)))
    assert enough_bytes(topology, threads, cores) == times * ENOUGH_BYTES


def test_gradients_travel_while_backward_runs(tmp_path: Path) -> None:
    """The last layer's gradient has arrived before the first layer's is even announced."""
    width = ENOUGH_BYTES // 256  # less would wait for the gradients of other layers
    models = [
        torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, width))
        for _ in range(2)
    ]
    path = tmp_path / "timeline.json"

    def main(rank: int) -> None:
        model = models[rank]
        if rank == 0:
            current().recording.start(str(path), False)
        hvd.barrier()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        hidden = model[1](model[0](torch.ones(2, 64)))
        # Waits in the middle of backward for what was enqueued before, and for nothing else.
        hidden.register_hook(lambda gradient: hvd.barrier())
        model[2](hidden).sum().backward()
        optimizer.step()

    run_ranks(2, main)
    events = json.loads(path.read_text())
    assert max(times(events, "allreduce.2.weight")) <= min(times(events, "allreduce.0.weight"))


def times(events: list[dict[str, Any]], tensor: str) -> list[float]:
    """When something began or ended for a tensor."""
    (track,) = {e["pid"] for e in events if e.get("args", {}).get("name") == tensor}
    return [e["ts"] for e in events if e["pid"] == track and e["ph"] in "BE"]


def test_adasum_combines_the_steps_of_the_ranks() -> None:
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> Tensor:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model, lr=0.1), model.named_parameters(), op=hvd.Adasum
        )
        before = [p.detach().clone() for p in model.parameters()]
        loss_of(model, rank).backward()
        own = [-0.1 * p.grad for p in model.parameters() if p.grad is not None]
        optimizer.step()
        for parameter, start, delta in zip(model.parameters(), before, own, strict=True):
            combined = hvd.allreduce(delta, op=hvd.Adasum)
            torch.testing.assert_close(parameter.detach(), start + combined)
        optimizer.synchronize()
        with pytest.raises(AssertionError, match="Skipping synchronization"):
            optimizer.skip_synchronize().__enter__()
        return flat(model)

    results = run_ranks(SIZE, main)
    assert all(torch.equal(result, results[0]) for result in results)


def test_an_optimizer_is_wrapped_once() -> None:
    def main(rank: int) -> None:
        wrapped = hvd.DistributedOptimizer(
            torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
        )
        with pytest.raises(ValueError, match="is a DistributedOptimizer already"):
            hvd.DistributedOptimizer(wrapped)

    run_ranks(2, main)
