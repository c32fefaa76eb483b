"""A sharded optimizer makes the steps of one that is not, bit by bit, with 1/N of its state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from tests.ranks import run_ranks

Tensor = torch.Tensor
Make = Callable[[Any], torch.optim.Optimizer]
STEPS = 4

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
}


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def network() -> nn.Module:
    torch.manual_seed(1)
    first: Any = nn.Conv2d(1, 3, 3)
    return nn.Sequential(
        first.to(memory_format=torch.channels_last),
        nn.Tanh(), nn.Flatten(), nn.Linear(3 * 16, 7), Scaled(), nn.Linear(7, 3, bias=False),
    )  # fmt: skip


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 1, 6, 6, generator=generator),
         torch.randint(0, 3, (4,), generator=generator))
        for _ in range(STEPS)
    ]  # fmt: skip


def backward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    torch.autograd.backward([loss])
    return loss


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one, other)


def both(size: int, make: Make, body: Callable[[int, nn.Module, Any], Any], **options: Any) -> None:
    """Run `body` with an optimizer that is sharded and with one that is not: the same weights."""

    def run(rank: int, shard_state: bool) -> Tensor:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), model.named_parameters(), shard_state=shard_state, **options
        )
        body(rank, model, optimizer)
        return weights(model)

    results = []
    for sharded in (False, True):
        models = [network() for _ in range(size)]
        results.append(run_ranks(size, partial(run, shard_state=sharded)))
    plain, sharded_weights = results
    assert all(same(plain[0], each) for each in plain[1:] + sharded_weights)


def train(rank: int, model: nn.Module, optimizer: Any) -> None:
    for batch in batches(rank):
        optimizer.zero_grad()
        backward(model, batch)
        optimizer.step()


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
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


def test_parameters_that_freeze_thaw_and_come_later() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(list(parameters)[:-1], lr=0.01)

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


def states_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(states_equal(one[k], other[k]) for k in one)
    return bool(one == other)


def test_the_consolidated_state_is_that_of_the_plain_optimizer() -> None:
    saved: dict[bool, Any] = {}

    def body(rank: int, model: nn.Module, optimizer: Any) -> None:
        train(rank, model, optimizer)
        sharded = hasattr(optimizer, "consolidate")
        state = optimizer.consolidate() if sharded else optimizer.state_dict()
        if rank == 0:
            saved[sharded] = copy.deepcopy(state)

    both(3, OPTIMIZERS["adam"], body)
    assert states_equal(saved[True]["state"], saved[False]["state"])
    assert saved[True]["param_groups"] == saved[False]["param_groups"]
    model = network()
    alone = OPTIMIZERS["adam"](model.parameters())
    alone.load_state_dict(saved[True])


@pytest.mark.parametrize("sizes", [(4, 2), (2, 3), (3, 1), (1, 2)], ids=str)
def test_training_goes_on_with_another_number_of_ranks(sizes: tuple[int, int]) -> None:
    """The oracle loads the state into optimizers without shards."""
    results = []
    for sharded in (False, True):
        models = [network() for _ in range(4)]
        saved: list[Any] = []

        def main(
            rank: int, sharded: bool = sharded, models: Any = models, saved: Any = saved
        ) -> Any:
            model = models[rank]
            optimizer = hvd.DistributedOptimizer(
                OPTIMIZERS["adam"](model.parameters()), shard_state=sharded
            )
            if saved:
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(copy.deepcopy(saved[1]))
            for batch in batches(0):  # The same on all ranks: independent of their number.
                optimizer.zero_grad()
                backward(model, batch)
                optimizer.step()
            state = optimizer.consolidate() if sharded else optimizer.state_dict()
            return copy.deepcopy(model.state_dict()), copy.deepcopy(state)

        saved.extend(run_ranks(sizes[0], main)[0])
        results.append(run_ranks(sizes[1], main)[0])
    for one, other in zip(*results, strict=True):
        assert one.keys() == other.keys()
    for name, value in results[0][0].items():
        torch.testing.assert_close(results[1][0][name], value, rtol=0, atol=0)
    assert states_equal(results[0][1]["state"], results[1][1]["state"])


def test_sharded_state_dicts() -> None:
    models = [network() for _ in range(3)]

    def optimizer_of(model: nn.Module, process_set: Any = None) -> Any:
        options = {} if process_set is None else {"process_set": process_set}
        return hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), model.named_parameters(), shard_state=True,
            **options,
        )  # fmt: skip

    def main(rank: int) -> Any:
        model = models[rank]
        optimizer = optimizer_of(model)
        train(rank, model, optimizer)
        state = copy.deepcopy(optimizer.state_dict())
        assert state["shards"]["layout"] == [[2], [0]] and state["shards"]["position"] == rank
        twin = copy.deepcopy(model)
        again = optimizer_of(twin)
        again.load_state_dict(state)
        train(rank, model, optimizer)
        train(rank, twin, again)
        assert same(weights(model), weights(twin))
        other = {**state, "shards": {**state["shards"], "position": 1 - rank}}
        with pytest.raises(ValueError, match="shards of another rank of the set: "):
            again.load_state_dict(other)
        with pytest.raises(ValueError, match="groups have"):
            again.load_state_dict({**state, "param_groups": [{"params": [0]}]})
        return state

    states = run_ranks(2, main)

    def three(rank: int) -> None:
        with pytest.raises(ValueError, match=r"\[\[2\], \[0\]\] there, \[\[3\], \[0\]\] here"):
            optimizer_of(models[rank]).load_state_dict(states[0])

    run_ranks(3, three)

    def alone(rank: int) -> None:
        with pytest.raises(ValueError, match="a shard of one of 2 ranks, and this rank is alone"):
            optimizer_of(models[rank]).load_state_dict(states[0])

    run_ranks(1, alone)


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


def test_elastic_states_keep_all_of_it_for_any_number_of_ranks() -> None:
    """A commit of 3 ranks is restored by 2 of them, and by a newcomer that has no state."""
    models = [network() for _ in range(3)]
    states: list[Any] = [None] * 3

    def make(rank: int, number: int) -> Any:
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](models[number].parameters()), shard_state=True
        )
        return hvd.elastic.TorchState(model=models[number], optimizer=optimizer)

    def three(rank: int) -> Any:
        state = states[rank] = make(rank, rank)
        train(0, models[rank], state.optimizer)
        state.save()
        whole = state.optimizer.consolidate()
        train(0, models[rank], state.optimizer)  # Lost by the failure.
        return copy.deepcopy(whole)

    whole = run_ranks(3, three)[0]

    def two(rank: int) -> Any:
        # Rank 0 was there before, rank 1 is new.
        state = states[0] if rank == 0 else make(rank, 1)
        if rank == 0:
            state.restore()
        state.sync()
        found = copy.deepcopy(state.optimizer.consolidate())
        train(0, models[rank], state.optimizer)
        assert sum(s["exp_avg"].numel() for s in state.optimizer.state.values()) > 0
        return found, weights(models[rank])

    (first, weights_0), (second, weights_1) = run_ranks(2, two)
    assert states_equal(first["state"], whole["state"])
    assert states_equal(second["state"], whole["state"])
    assert same(weights_0, weights_1)


def test_commits_by_step_are_refused() -> None:
    def main(rank: int) -> None:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["sgd"](model.parameters()), shard_state=True
        )
        with pytest.raises(ValueError, match="shard_state=True: use commit"):
            hvd.elastic.TorchState(model=model, optimizer=optimizer, commit="step")

    run_ranks(2, main)


def test_state_that_one_rank_has_loaded_is_broadcast() -> None:
    whole: list[Any] = []

    def main(rank: int) -> Any:
        model = network()
        optimizer = hvd.DistributedOptimizer(
            OPTIMIZERS["adam"](model.parameters()), shard_state=True
        )
        if not whole:
            train(0, model, optimizer)
            return optimizer.consolidate()
        if rank == 0:
            optimizer.load_state_dict(whole[0])
            optimizer.param_groups[0]["lr"] = 0.5
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert optimizer.param_groups[0]["lr"] == 0.5
        return optimizer.consolidate()

    whole.append(run_ranks(2, main)[0])
    for state in run_ranks(2, main):
        assert states_equal(state["state"], whole[0]["state"])
