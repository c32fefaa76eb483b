"""DistributedOptimizer together with what torch offers for training."""

from __future__ import annotations

import copy
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd
from tests.ranks import run_ranks

SIZE = 2
Tensor = torch.Tensor
torch.manual_seed(0)
NET = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
START = torch.cat([parameter.detach().reshape(-1) for parameter in NET.parameters()])


def flat(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def data(rank: int, step: int = 0) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + rank))


def train(
    forward: Callable[[nn.Module, Tensor], Tensor],
    step: Callable[[nn.Module, Any, Tensor], None],
    prepare: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> None:
    """Three steps on all ranks, and the same in one process; the weights must agree."""
    models = [copy.deepcopy(NET) for _ in range(SIZE)]
    ready = [prepare(model) for model in models]

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(models[rank].parameters(), lr=0.1), models[rank].named_parameters()
        )
        for number in range(3):
            optimizer.zero_grad()
            step(models[rank], optimizer, forward(ready[rank], data(rank, number)).square().mean())

    run_ranks(SIZE, main)
    alone = copy.deepcopy(NET)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for number in range(3):
        optimizer.zero_grad()
        batch = torch.cat([data(rank, number) for rank in range(SIZE)])
        alone(batch).square().mean().backward()
        optimizer.step()
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert not torch.equal(flat(alone), START)
    torch.testing.assert_close(flat(models[0]), flat(alone), rtol=1e-5, atol=1e-6)


def plain_forward(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs)


def plain_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


def scaler_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def unscaling_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    scaler.step(optimizer)
    scaler.update()


def horovod_scaler_step(model: nn.Module, optimizer: Any, loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1e6)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("step", [scaler_step, unscaling_step, horovod_scaler_step])
def test_grad_scaler(step: Callable[[nn.Module, Any, Tensor], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(plain_forward, step)
    assert not any("skip_synchronize" in str(each.message) for each in caught)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    def forward(model: nn.Module, inputs: Tensor) -> Tensor:
        assert isinstance(model, nn.Sequential)
        inputs = inputs.clone().requires_grad_()
        for layers in (model[:2], model[2:]):
            # torch reads the state of its generator, which ranks share here, with a lock held: a
            # garbage collection at that moment lets a thread run that waits for the lock for ever.
            inputs = checkpoint(layers, inputs, use_reentrant=reentrant, preserve_rng_state=False)
        return inputs

    train(forward, plain_step)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(backend: str) -> None:
    def compile_(model: nn.Module) -> nn.Module:
        compiled = torch.compile(model, backend=backend)
        compiled(data(0))  # here, and not in both threads at once
        return compiled

    train(plain_forward, plain_step, compile_)


@pytest.mark.skipif(
    not hasattr(torch._C._dynamo.eval_frame, "set_code_exec_strategy"), reason="PyTorch is older"
)
def test_calls_in_a_compiled_function_are_not_compiled_for_each_name() -> None:
    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        for number in range(12):
            tensor = hvd.allreduce(tensor + 1, name=f"compiled {number}")
            tensor = tensor + hvd.broadcast(tensor, 0, name=f"compiled, too {number}")
        return tensor

    def main(_rank: int) -> None:
        compiled = torch.compile(reduced, backend="eager")
        counters = torch._dynamo.utils.counters["frames"]
        before = counters["total"]
        found = compiled(torch.zeros(2))
        assert counters["total"] - before == 1
        assert torch.equal(found, reduced(torch.zeros(2)))

    run_ranks(1, main)


def test_autocast() -> None:
    models = [copy.deepcopy(NET) for _ in range(SIZE)]

    def main(rank: int) -> None:
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(models[rank].parameters(), lr=0.1), models[rank].named_parameters()
        )
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = models[rank](data(rank)).square().mean()
        plain_step(models[rank], optimizer, loss)

    run_ranks(SIZE, main)
    assert torch.equal(flat(models[0]), flat(models[1]))
    assert not torch.equal(flat(models[0]), START)


WORKERS = """
import sys, torch
import hvdlite.torch as hvd

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        try:
            hvd.rank()
        except ValueError as error:
            assert "init" in str(error), error
            return torch.tensor([float(index)])
        raise AssertionError("a worker believes that it is a rank")

if __name__ == "__main__":
    hvd.init()
    model = torch.nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters())
    loader = torch.utils.data.DataLoader(
        Squares(), batch_size=2, num_workers=1, multiprocessing_context=sys.argv[1])
    for batch in loader:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        hvd.allreduce(torch.ones(1))
    print("trained on", hvd.size())
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_data_loader_workers_are_no_ranks(method: str, tmp_path: Any) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system cannot start processes by {method}")
    script = tmp_path / "train.py"
    script.write_text(WORKERS)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(script), method],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "trained on 1" in result.stdout
