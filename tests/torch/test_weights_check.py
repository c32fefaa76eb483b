"""HVDLITE_CHECK_WEIGHTS: weights and optimizer state that have diverged are named.

The same training with and without a fault: a normal one never raises, and a fault on one rank is
named at the next check, with the step, the tensor, the rank and both values.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hvdlite.torch as hvd
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.comparison import BLOCK_BYTES, sums_of
from hvdlite.torch.weights import of_tensor, sums_on_device
from tests.elastic_job import ElasticJob, Worker
from tests.ranks import run_ranks
from tests.torch.small_net import loss_of, net

SIZE, STEPS, EVERY = 3, 20, 5
CHECKED = Config(check_weights=EVERY)
Fault = Callable[[int, int, nn.Module, Any], None]  # (rank, step, model, optimizer)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train(
    make: Callable[[nn.Module], torch.optim.Optimizer],
    fault: Fault = lambda *_: None,
    steps: int = STEPS,
    config: Config = CHECKED,
    passes: int = 1,
    **options: Any,
) -> list[str]:
    """What each rank is told; empty where nothing has diverged."""
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> str:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            make(model), model.named_parameters(), backward_passes_per_step=passes, **options
        )
        try:
            for step in range(1, steps + 1):
                fault(rank, step, model, optimizer)
                optimizer.zero_grad()
                for number in range(passes):
                    loss_of(model, rank, passes * step + number).backward()
                optimizer.step()
        except RuntimeError as error:
            return str(error)
        return ""

    texts = run_ranks(SIZE, main, config=config)
    assert len(set(texts)) == 1, texts
    return texts


@pytest.mark.parametrize(
    "options",
    [
        {"make": momentum},
        {"make": adam, "passes": 2},
        {"make": adam, "gradient_as_bucket_view": True},
        {"make": adam, "compression": hvd.Compression.fp16},
        {"make": adam, "shard_state": True},
        {"make": momentum, "op": hvd.Adasum},
    ],
    ids=["momentum", "passes", "fused", "fp16", "sharded", "adasum"],
)
def test_normal_training_is_no_fault(options: dict[str, Any]) -> None:
    assert train(**options) == [""] * SIZE


def by_one_ulp(tensor: torch.Tensor, place: tuple[int, ...]) -> None:
    with torch.no_grad():
        tensor[place] = torch.nextafter(tensor[place], torch.tensor(9.0))


def test_one_weight_that_changes_on_one_rank() -> None:
    """By one unit in the last place, after step 7: the check after step 10 finds it."""

    def fault(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        if (rank, step) == (1, 8):
            by_one_ulp(model.get_parameter("2.weight"), (1, 3))

    # A learning rate of 0 keeps what differs as it is.
    text = train(lambda model: torch.optim.SGD(model.parameters(), lr=0.0), fault)[0]
    value = net().get_parameter("2.weight")
    changed = copy.deepcopy(value)
    by_one_ulp(changed, (1, 3))
    here, there = np.float32(value[1, 3].item()), np.float32(changed[1, 3].item())
    assert text.startswith(
        "weights have diverged at step 10: rank 1 differs from ranks 0 and 2 in 1 of"
    )
    values = f"{here!s} on rank 0 and {there!s} on rank 1"
    assert f"first in '2.weight': element [1, 3] is {values}" in text
    assert "They were equal after step 5" in text


@pytest.mark.parametrize("gradient_as_bucket_view", [False, True])
def test_momentum_that_changes_on_one_rank(gradient_as_bucket_view: bool) -> None:
    def fault(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        if (rank, step) == (2, 12):
            optimizer.state[model.get_parameter("0.bias")]["momentum_buffer"][2] += 1

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)

    text = train(make, fault, gradient_as_bucket_view=gradient_as_bucket_view)[0]
    assert "step 15: rank 2 differs from ranks 0 and 1 in 1 of" in text
    assert "first in '0.bias: momentum_buffer': element [2] is" in text


def test_ranks_that_begin_with_other_weights() -> None:
    def fault(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        if (rank, step) == (0, 1):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1)

    text = train(momentum, fault)[0]
    assert "at step 1: rank 0 differs from ranks 1 and 2" in text
    assert "Call broadcast_parameters and broadcast_optimizer_state before the first step" in text


@pytest.mark.parametrize("shard_state", [False, True])
def test_a_learning_rate_of_one_rank(shard_state: bool) -> None:
    def fault(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        if (rank, step) == (1, 5):
            optimizer.param_groups[0]["lr"] = 0.5

    text = train(adam, fault, shard_state=shard_state)[0]
    assert "'param_groups[0]: lr': it is 0.01 on rank 0 and 0.5 on rank 1" in text


def test_buffers_and_the_weights_of_other_ranks_are_not_compared() -> None:
    """Statistics of batch norms, and members of a process set whose weights are their own."""
    models = [nn.Sequential(net(), nn.BatchNorm1d(2)) for _ in range(4)]
    for model in models[2:]:
        nn.init.ones_(model.get_parameter("0.0.weight"))

    def main(rank: int) -> torch.Tensor:
        sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            momentum(model), model.named_parameters(), process_set=sets[rank // 2]
        )
        for step in range(STEPS):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.get_buffer("1.running_mean")

    means = run_ranks(4, main, config=CHECKED)
    assert not torch.equal(means[0], means[1])


def test_uneven_steps_count_anew_after_a_join() -> None:
    """Rank r makes r steps before it joins; then all make steps again, and are compared."""
    models = [net() for _ in range(SIZE)]

    def main(rank: int) -> str:
        model = models[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters()
        )

        def steps(number: int) -> None:
            for step in range(number):
                optimizer.zero_grad()
                loss_of(model, rank, step).backward()
                optimizer.step()

        steps(3 * rank)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=SIZE - 1)
        steps(STEPS)
        if rank == 0:
            by_one_ulp(model.get_parameter("0.bias"), (1,))
        with pytest.raises(RuntimeError) as error:
            steps(EVERY)
        return str(error.value)

    texts = run_ranks(SIZE, main, config=CHECKED)
    assert len(set(texts)) == 1
    assert "at step 25: rank 0 differs" in texts[0]


def test_elastic_ranks_count_from_each_world() -> None:
    """One rank dies after 7 steps: the others go on, and are compared alike."""
    models = [net() for _ in range(3)]
    job = ElasticJob(3, CHECKED)
    lock = threading.Lock()

    def main(worker: Worker) -> int:
        model = models[worker.number]
        optimizer = hvd.DistributedOptimizer(momentum(model), model.named_parameters())
        seen: list[int] = []

        @hvd.elastic.run
        def training(state: Any) -> None:
            while state.step < STEPS:
                if state.step == 7 and worker.number == 1:
                    worker.die()
                optimizer.zero_grad()
                loss_of(model, hvd.rank(), state.step).backward()
                optimizer.step()
                state.step += 1
                with lock:
                    seen.append(state.step)
                state.commit()

        training(hvd.elastic.TorchState(model, optimizer, step=0))
        return len(seen)

    assert job.run(main)[0] == STEPS
    assert torch.equal(models[0][0].weight, models[2][0].weight)


def test_nothing_is_compared_without_the_setting() -> None:
    def fault(rank: int, step: int, model: nn.Module, optimizer: Any) -> None:
        assert optimizer._weights_check is None
        if (rank, step) == (0, 2):
            by_one_ulp(model.get_parameter("0.bias"), (0,))

    assert train(momentum, fault, config=Config()) == [""] * SIZE


@pytest.mark.parametrize("size", [0, 1, 8, 8191, 8192, 8193, 5 * BLOCK_BYTES + 3])
def test_sums_of_devices_are_those_of_numpy(size: int) -> None:
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    assert sums_on_device(torch.from_numpy(data)).tolist() == sums_of(data).tolist()
    skipped = min(size, 4)  # No word begins there.
    part = torch.from_numpy(np.concatenate([data[:4], data]))[skipped:]
    assert sums_on_device(part).tolist() == sums_of(data).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_tensors_that_are_parts_of_others(dtype: torch.dtype) -> None:
    whole = torch.arange(20_000).reshape(200, 100).to(dtype)
    for part in (whole[:, 0], whole[:, 0:1], whole[0, ::2], whole[:1, 0].expand(5), whole.T):
        other = torch.tensor(part.tolist(), dtype=dtype)
        assert of_tensor("x", part).facts() == of_tensor("x", other).facts()
