"""DistributedOptimizer: what happens to gradients between backward and step."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.torch.compression import Compressor
from hvdlite.torch.optimizer import gradient_exchange as exchange
from tests.ranks import run_ranks
from tests.torch.small_net import SIZE, Tensor, flat, loss_of, net, reduced_gradients, sgd


def trained_alone(steps: Iterable[Iterable[tuple[int, int]]]) -> Tensor:
    """The weights of one process after steps over these data of ranks, each by its number."""
    model = net()
    optimizer = sgd(model, 0.01)
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            (loss_of(model, *batch) / 2).backward()
        optimizer.step()
    return flat(model)


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


def spoil_by_cancelling(model: nn.Module, optimizer: Any) -> None:
    next(model.parameters()).grad = None
    optimizer.step()


SPOILERS = [spoil_by_clipping, spoil_by_replacing, spoil_by_skipping, spoil_by_cancelling]


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


@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"gradient_as_bucket_view": True}])
@pytest.mark.parametrize("how", ["optimizer", "optimizer to zero", "model", "nothing is set to 0"])
def test_a_step_that_is_skipped_after_synchronize_leaves_nothing_behind(
    options: dict[str, Any], how: str
) -> None:
    """As a loop does which skips infinite gradients. Then one rank has no batch, or all have."""
    models = [net() for _ in range(2)]

    def zero(model: nn.Module, optimizer: Any) -> None:
        if how == "model":
            model.zero_grad()
        elif how != "nothing is set to 0":
            optimizer.zero_grad(set_to_none=how == "optimizer")

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model, 0.01), model.named_parameters(), **options)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, 2 * step).backward()
            optimizer.synchronize()
            zero(model, optimizer)
            if rank == 0 or step != 2 or how == "nothing is set to 0":
                loss_of(model, rank, 2 * step + 1).backward()
            optimizer.step()

    run_ranks(2, main)
    alone = trained_alone(
        [
            (rank, 2 * step + last)
            for rank, last in product(range(2), range(2))
            if how == "nothing is set to 0" or (last and (rank == 0 or step != 2))
        ]
        for step in range(4)
    )
    for model in models:
        torch.testing.assert_close(flat(model), alone)


def test_reduced_gradients_that_were_kept_are_put_back_for_the_step() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Sum)
        before = flat(model)
        loss_of(model, rank).backward()
        optimizer.synchronize()
        kept = [parameter.grad for parameter in model.parameters()]
        optimizer.zero_grad()
        for parameter, gradient in zip(model.parameters(), kept, strict=True):
            parameter.grad = gradient
        with optimizer.skip_synchronize():
            optimizer.step()
        torch.testing.assert_close(before - flat(model), reduced_gradients("Sum", 2))

    run_ranks(2, main)


def test_a_scaler_skips_a_step_and_the_next_one_is_reduced() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            sgd(model, 0.01), model.named_parameters(), shard_state=True
        )
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model, rank, step) * (torch.inf if step == 1 and rank == 1 else 1)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.step(optimizer)
            scaler.update()

    run_ranks(2, main)
    alone = trained_alone([(rank, step) for rank in range(2)] for step in (0, 2))
    for model in models:
        torch.testing.assert_close(flat(model), alone)


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


@pytest.mark.parametrize(
    "options",
    [{}, {"gradient_as_bucket_view": True}, {"compression": hvd.Compression.fp16}, {"groups": 1}],
    ids=str,
)
def test_a_gradient_is_set_to_none_after_backward(options: dict[str, Any]) -> None:
    """As for a layer that is to stay as it is: after synchronize() it does, before is an error."""
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(sgd(model, 0.01), model.named_parameters(), **options)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(model, rank, step).backward()
            if step == 3:  # The others have what they wait for, and go on.
                if rank == 0:
                    model[2].bias.grad = None
                    with pytest.raises(RuntimeError, match=r"2\.bias was set to None after"):
                        optimizer.step()
                else:
                    optimizer.step()
                break
            optimizer.synchronize()
            before = model[2].bias.clone()
            model[2].bias.grad = None
            with optimizer.skip_synchronize():
                optimizer.step()
            assert torch.equal(model[2].bias, before)

    run_ranks(2, main)


def test_zero_grad_while_gradients_travel() -> None:
    models = [net() for _ in range(2)]

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(sgd(models[rank]), models[rank].named_parameters())
        loss_of(models[rank], rank).backward()
        with pytest.raises(AssertionError, match=r"race condition. .* by loss.backward\(inputs="):
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


class Failing(Compressor):
    """Notes whether autograd records, and fails where the results come."""

    recorded: ClassVar[list[bool]] = []

    @classmethod
    def compress(cls, tensor: Tensor) -> tuple[Tensor, Any]:
        cls.recorded.append(torch.is_grad_enabled())
        return tensor, None

    @classmethod
    def decompress(cls, tensor: Tensor, context: Any) -> Tensor:
        cls.recorded.append(torch.is_grad_enabled())
        raise ArithmeticError("decompress fails")


@pytest.mark.parametrize("records", [True, False])
def test_synchronize_records_nothing_and_leaves_the_mode_as_it_was(records: bool) -> None:
    models = [net() for _ in range(SIZE)]
    Failing.recorded = []

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(
            sgd(models[rank]), models[rank].named_parameters(), compression=Failing
        )
        loss_of(models[rank], rank).backward()
        with torch.set_grad_enabled(records):
            with pytest.raises(ArithmeticError, match="decompress fails"):
                optimizer.synchronize()
            assert torch.is_grad_enabled() is records

    run_ranks(SIZE, main)
    assert Failing.recorded and not any(Failing.recorded)
