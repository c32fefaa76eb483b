"""DistributedOptimizer: what travels, when, and what is refused."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch

import hvdlite.torch as hvd
from tests.ranks import run_ranks
from tests.torch.small_net import (
    SIZE,
    Tensor,
    flat,
    gradients,
    loss_of,
    net,
    reduced_gradients,
    sgd,
)


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


def some_groups(model: torch.nn.Sequential) -> list[list[torch.nn.Parameter]]:
    first, last = cast(list[torch.nn.Linear], [model[0], model[2]])
    return [[first.weight, last.bias], [first.bias]]


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_predivide_factor": 2.5},
        {"groups": 2},
        {"groups": 1},
        {"groups": 100},
        pytest.param({"groups": some_groups}, id="groups of parameters"),
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


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"op": hvd.Adasum}], ids=str)
def test_a_scheduler_of_the_optimizer_that_was_wrapped_is_heard_after_a_load(
    options: dict[str, Any], size: int
) -> None:
    models = [net() for _ in range(size)]
    twins = [net() for _ in range(size)]

    def steps(optimizer: Any, scheduler: Any, model: torch.nn.Module, rank: int) -> None:
        for number in range(2):
            optimizer.zero_grad()
            loss_of(model, rank, number).backward()
            optimizer.step()
            scheduler.step()

    def main(rank: int) -> None:
        inner = torch.optim.SGD(models[rank].parameters(), lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, gamma=0.5)
        optimizer = hvd.DistributedOptimizer(inner, models[rank].named_parameters(), **options)
        own = torch.optim.SGD(twins[rank].parameters(), lr=1.0, momentum=0.5)
        expected = hvd.DistributedOptimizer(own, twins[rank].named_parameters(), **options)
        for loads in (False, True):
            if loads:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                state = hvd.elastic.TorchState(model=models[rank], optimizer=optimizer)
                state.restore()
            steps(optimizer, scheduler, models[rank], rank)
            for group in expected.param_groups:
                group["lr"] = 1.0 if not loads else 0.25
            steps(expected, torch.optim.lr_scheduler.StepLR(expected, 1, 0.5), twins[rank], rank)
        assert optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] == 0.0625
        assert optimizer.param_groups is inner.param_groups
        assert optimizer.state is inner.state

    run_ranks(size, main)
    for model, twin in zip(models, twins, strict=True):
        assert torch.equal(flat(model), flat(twin))


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
