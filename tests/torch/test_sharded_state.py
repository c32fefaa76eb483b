"""A sharded optimizer makes the steps of one that is not, bit by bit, with 1/N of its state."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from hvdlite.common.transport.inprocess import InProcessTransport
from tests.ranks import run_ranks
from tests.torch.sharded_training import (
    OPTIMIZERS,
    STEPS,
    Make,
    backward,
    batches,
    both,
    network,
    train,
)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 3) for name in OPTIMIZERS), ("adam", 2), ("momentum", 4)]
)
def test_the_weights_are_those_without_shards_bit_by_bit(name: str, size: int) -> None:
    both(size, OPTIMIZERS[name], train)


@pytest.mark.parametrize(
    "options",
    [
        {"op": hvd.Sum},
        {"gradient_predivide_factor": 2.0},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16},
    ],
    ids=str,
)
def test_options(options: dict[str, Any]) -> None:
    both(2, OPTIMIZERS["adam"], train, **options)


def test_each_rank_has_its_part_of_the_state() -> None:
    models = [network() for _ in range(4)]
    count = sum(parameter.numel() for parameter in models[0].parameters())

    def main(rank: int) -> int:
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](models[rank].parameters()), shard_state=True
        )
        assert type(optimizer).__name__ == "Adam" and isinstance(optimizer, torch.optim.Adam)
        train(rank, models[rank], optimizer)
        return sum(
            state[name].numel() for state in optimizer.state.values()
            for name in ("exp_avg", "exp_avg_sq")
        )  # fmt: skip

    sizes = run_ranks(4, main)
    # Beyond an equal part there is padding only: to 64 bytes for each parameter, and for each rank.
    assert len(set(sizes)) == 1 and count * 2 <= 4 * sizes[0] <= 2 * (count + 16 * 6 + 64)


def test_steps_are_counted() -> None:
    def main(rank: int) -> float:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), shard_state=True
        )
        hvd.metrics()  # Which counts from here on.
        train(rank, model, optimizer)
        return float(hvd.metrics()["steps_total"])

    assert run_ranks(2, main) == [STEPS, STEPS]


def test_passes_accumulate() -> None:
    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        for number in range(0, STEPS, 2):
            optimizer.zero_grad()
            for batch in batches(rank)[number : number + 2]:
                backward(model, batch)
            optimizer.step()

    both(2, OPTIMIZERS["adam"], body, backward_passes_per_step=2)


def test_gradients_are_clipped_as_without_shards() -> None:
    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        for batch in batches(rank):
            optimizer.zero_grad()
            backward(model, batch)
            optimizer.synchronize()
            assert nn.utils.clip_grad_norm_(model.parameters(), 0.1) > 0.1
            with optimizer.skip_synchronize():
                optimizer.step()

    both(3, OPTIMIZERS["momentum"], body)


def test_a_model_that_is_moved_after_synchronize_trains_as_before() -> None:
    def body(rank: int, model: Any, optimizer: Any) -> None:
        for number, batch in enumerate(batches(rank)):
            if number == 2:
                model.double().float()
            optimizer.zero_grad(set_to_none=False)
            backward(model, batch)
            if number == 1:
                optimizer.synchronize()
            optimizer.step()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the step() after synchronize()
        both(2, OPTIMIZERS["adam"], body)


@pytest.mark.parametrize("size", [2, 3])
def test_a_step_while_a_rank_has_joined_is_an_error(size: int) -> None:
    def main(rank: int) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), model.named_parameters(), shard_state=True
        )
        train(rank, model, optimizer)
        if rank:
            optimizer.zero_grad()
            backward(model, batches(rank)[0])
            for call in (optimizer.synchronize, optimizer.consolidate, optimizer.step):
                with pytest.raises(
                    hvd.HorovodInternalError, match="has joined, and with shard_sta"
                ):
                    call()
        hvd.join()

    run_ranks(size, main)


def test_schedulers_closures_and_groups() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        first, *others = parameters
        return torch.optim.Adam([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.01)

    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for batch in batches(rank):
            optimizer.zero_grad()
            loss = optimizer.step(lambda batch=batch: backward(model, batch))
            assert loss is not None
            scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**STEPS

    both(2, make, body)


@pytest.mark.parametrize("name", ["adam", "momentum"])
def test_parameters_that_freeze_thaw_and_come_later(name: str) -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](list(parameters)[:-1])

    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        *_, thawed, last = model.parameters()
        thawed.requires_grad_(False)
        last.requires_grad_(False)
        train(rank, model, optimizer)
        thawed.requires_grad_()
        train(rank, model, optimizer)
        last.requires_grad_()
        optimizer.add_param_group({"params": [last], "lr": 0.1})
        train(rank, model, optimizer)

    both(2, make, body)


@pytest.mark.parametrize("first_used", [0, 2])
def test_parameters_that_some_ranks_or_none_use(first_used: int) -> None:
    """The last layers are used by one rank in each step, and by none before step `first_used`."""

    def body(rank: int, model: Any, optimizer: Any) -> None:
        for number, batch in enumerate(batches(rank)):
            optimizer.zero_grad()
            all_of_it = number >= first_used and number % 2 == rank
            backward(model if all_of_it else model[:4], batch)
            optimizer.step()

    both(2, OPTIMIZERS["adam"], body)


def test_weights_that_are_loaded_or_replaced_are_stepped() -> None:
    start = network().state_dict()  # Made here: the threads of all ranks share the generator.

    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        train(rank, model, optimizer)
        model.load_state_dict(start)
        train(rank, model, optimizer)
        first = next(iter(model.parameters()))
        first.data = torch.ones_like(first)
        train(rank, model, optimizer)

    both(2, OPTIMIZERS["adam"], body)


def test_parameters_that_become_others_of_another_dtype() -> None:
    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        train(rank, model, optimizer)
        model.double()
        for inputs, target in batches(rank):
            optimizer.zero_grad()
            backward(model, (inputs.double(), target))
            optimizer.step()
        assert all(parameter.dtype == torch.float64 for parameter in model.parameters())

    both(2, OPTIMIZERS["sgd"], body)


def test_parameters_that_are_resized() -> None:
    """Without state they are stepped as they are; state of another shape is an error."""

    def body(rank: int, model: Any, optimizer: Any) -> None:
        for size in (2, 1, 3):
            model[-1].weight.data = torch.ones(size, 7)
            optimizer.zero_grad()
            model(batches(rank)[0][0]).square().sum().backward()
            optimizer.step()
            assert model[-1].weight.shape == (size, 7)

    both(2, OPTIMIZERS["sgd"], body)

    def with_state(rank: int) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), shard_state=True
        )
        with pytest.raises(ValueError, match=r"shape \(1, 7\).* exp_avg the shape \(2, 7\)"):
            body(rank, model, optimizer)

    run_ranks(2, with_state)


class Lamb(torch.optim.SGD):
    """Known by its name."""


class ByNorm(torch.optim.Optimizer):
    """Scales a gradient by the norm of its parameter: found by trying."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * parameter.norm() * group["lr"])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, "LBFGS looks at all parameters together"),
        (torch.optim.Adafactor, "Adafactor looks at rows and columns"),
        (Lamb, "Lamb looks at norms of parameters"),
        (ByNorm, "ByNorm, group 0: a step over flat tensors gives other values"),
    ],
)
def test_optimizers_that_look_beyond_an_element_are_refused(make: Make, words: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(make(network().parameters()), shard_state=True)

    run_ranks(2, main)


class Noting(torch.optim.SGD):
    """Counts its steps in a tensor of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.made = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.made += 1
        return super().step(closure)


def test_the_steps_of_the_check_are_not_counted() -> None:
    models = [network() for _ in range(2)]

    def main(rank: int) -> None:
        optimizer: Any = Noting(models[rank].parameters(), 0.1)
        optimizer = hvd.DistributedOptimizer(optimizer, shard_state=True)
        assert optimizer.made == 0
        train(rank, models[rank], optimizer)
        assert optimizer.made == STEPS

    run_ranks(2, main)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": hvd.Adasum}, "op must be Average or Sum, not Adasum"),
        ({"op": hvd.Min}, "op must be Average or Sum, not Min"),
        ({"gradient_as_bucket_view": True}, "gradient_as_bucket_view both say"),
        ({"groups": 2}, "groups both say"),
        ({"segmentation": "mb:1"}, "segmentation both say"),
    ],
    ids=str,
)
def test_options_that_are_refused(options: dict[str, Any], words: str) -> None:
    def main(rank: int) -> None:
        with pytest.raises(ValueError, match=words):
            hvd.DistributedOptimizer(
                OPTIMIZERS["sgd"](network().parameters()), shard_state=True, **options
            )

    run_ranks(2, main)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Bytes that each rank has given to its transport."""
    counts: Counter[int] = Counter()
    isend = InProcessTransport.isend

    def counting(self: InProcessTransport, rank: int, array: Any) -> Any:
        counts[self.rank] += array.nbytes
        return isend(self, rank, array)

    monkeypatch.setattr(InProcessTransport, "isend", counting)
    return counts


@pytest.mark.parametrize("shard_state", [False, True])
def test_bytes_of_a_step(sent: Counter[int], shard_state: bool) -> None:
    """As of an allreduce: a rank sends 2 (n - 1) / n of the gradients."""
    size, width = 4, 128
    values = width * width * 4 + width * 4

    def main(rank: int) -> tuple[int, int]:
        model = nn.Linear(width, width)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(model.parameters()), model.named_parameters(), shard_state=shard_state
        )
        for _ in range(2):  # The first one arranges shards, and copies values.
            hvd.barrier()
            before = sent[current().rank]
            optimizer.zero_grad()
            model(torch.ones(2, width)).sum().backward()
            optimizer.step()
            hvd.barrier()
        return before, sent[current().rank]

    # Each rank is a host: inside of one they share memory, and send nothing.
    counts = run_ranks(size, main, hosts=[[rank] for rank in range(size)])
    for before, after in counts:
        assert after - before == pytest.approx(2 * (size - 1) / size * values, rel=0.02)
