"""Checkpoints of PyTorch: models, optimizers, parts of tensors, DTensors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.numpy as numpy_hvd
import hvdlite.torch as hvd
from tests.limits import HANG_SECONDS
from tests.ranks import run_ranks
from tests.torch.sharded_training import Counting

pytest.importorskip("safetensors", reason="the extra 'checkpoint' is not installed")

Layout = hvd.checkpoint.Layout


def model(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 12), torch.nn.BatchNorm1d(12), torch.nn.Linear(12, 4)
    )


def train(net: Any, optimizer: Any, scheduler: Any, steps: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(5, 8, generator=generator)).square().mean().backward()
        optimizer.step()
        scheduler.step()


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "adamw, lr as a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), amsgrad=True),
    "counts in state": lambda p: Counting(p, 1e-2, "state"),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_fresh_model_and_optimizer_go_on_where_others_stopped(tmp_path: Path, kind: str) -> None:
    """The oracle trains on without a checkpoint. The fresh optimizer has made no step."""

    def start(seed: int) -> dict[str, Any]:
        net = model(seed)
        optimizer = OPTIMIZERS[kind](net.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"model": net, "optimizer": optimizer, "scheduler": scheduler, "step": 0}

    def go(state: dict[str, Any], steps: int) -> None:
        train(state["model"], state["optimizer"], state["scheduler"], steps)

    first = start(0)
    go(first, 3)
    hvd.checkpoint.save(tmp_path / "it", {**first, "step": 3})
    second = start(1)
    assert hvd.checkpoint.load(tmp_path / "it", second)["step"] == 3
    assert second["optimizer"].param_groups[0]["params"][0] is next(second["model"].parameters())
    go(first, 3)
    go(second, 3)
    for name, value in first["model"].state_dict().items():
        assert torch.equal(second["model"].state_dict()[name], value), name
    assert second["scheduler"].get_last_lr() == first["scheduler"].get_last_lr()


def test_parts_of_parameters_with_their_optimizer(tmp_path: Path) -> None:
    """Saved by 4 ranks that hold rows, loaded by 2 with columns; state follows its parameter."""
    full = torch.arange(96.0).reshape(8, 12)
    four, two = Layout([4], [0, -1]), Layout([2], [-1, 0])

    def part(rank: int, layout: Any) -> Any:
        return full[tuple(slice(*each) for each in layout.box((8, 12), rank))].clone()

    def build(values: Any) -> tuple[Any, Any]:
        net = torch.nn.Module()
        net.register_parameter("w", torch.nn.Parameter(values))
        net.register_parameter("b", torch.nn.Parameter(torch.zeros(3)))
        return net, torch.optim.Adam(net.parameters(), 1e-3)

    def write(rank: int) -> None:
        net, optimizer = build(part(rank, four))
        ((net.w**2).sum() / 2 + net.b.sum()).backward()  # the gradient is the value
        optimizer.step()
        state = {"net": net, "optimizer": optimizer}
        hvd.checkpoint.save(tmp_path / "it", state, {"net": {"w": [[4], [0, -1]]}})

    def read(rank: int) -> None:
        net, optimizer = build(torch.zeros(8, 6))
        state = {"net": net, "optimizer": optimizer}
        hvd.checkpoint.load(tmp_path / "it", state, {"net.w": two})
        assert torch.allclose(optimizer.state[net.w]["exp_avg"], 0.1 * part(rank, two))
        assert optimizer.state[net.w]["step"] == 1
        assert torch.allclose(net.w, part(rank, two), atol=2e-3)
        assert not torch.equal(net.w[:, :3], torch.zeros(8, 3))

    run_ranks(4, write)
    run_ranks(2, read)


def test_every_dtype_keeps_its_bits(tmp_path: Path) -> None:
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32",
             "float64", "complex64", "complex128"]  # fmt: skip
    state = {name: torch.arange(6).reshape(2, 3).to(getattr(torch, name)).T for name in names}
    state["scalar"] = torch.tensor(2.5, dtype=torch.bfloat16)
    state["conjugate"] = torch.tensor([1 + 2j, 3 - 4j]).conj()
    state["negative"] = state["conjugate"].imag
    hvd.checkpoint.save(tmp_path / "it", state)
    fresh = {name: torch.zeros_like(value) for name, value in state.items()}
    hvd.checkpoint.load(tmp_path / "it", fresh)
    assert all(torch.equal(fresh[name], value) for name, value in state.items())


FRESH = """
import sys, torch, torch.distributed as dist, hvdlite.torch as hvd
assert "hvdlite" in dist.Backend.backend_list
loaded = {m.partition(".process_group")[2] for m in sys.modules if ".torch.process_group" in m}
assert loaded == {"", ".checks", ".registration"}, loaded
assert not {"torch._dynamo", "torch.distributed.fsdp"} & sys.modules.keys()
assert not {"ml_dtypes", "tensorflow", "jax"} & sys.modules.keys()
state = {"w": torch.zeros(3, dtype=torch.bfloat16)}
hvd.checkpoint.load(sys.argv[1], state)
assert state["w"].tolist() == [2.5] * 3
"""


def test_a_fresh_process_imports_little_and_loads_bfloat16(tmp_path: Path) -> None:
    """Of groups it knows the name; numpy has the type from a package that nobody imported."""
    hvd.checkpoint.save(tmp_path / "it", {"w": torch.full((3,), 2.5, dtype=torch.bfloat16)})
    command = [sys.executable, "-W", "ignore", "-c", FRESH, str(tmp_path / "it")]
    subprocess.run(command, check=True, timeout=HANG_SECONDS)


class Wrapped:
    """An object around a model whose methods return what those of the model do."""

    def __init__(self, net: Any) -> None:
        self.net = net

    def state_dict(self) -> Any:
        return self.net.state_dict()

    def load_state_dict(self, state: Any) -> Any:
        return self.net.load_state_dict(state)


def test_an_object_stays_whatever_its_load_state_dict_returns(tmp_path: Path) -> None:
    hvd.checkpoint.save(tmp_path / "it", {"model": Wrapped(model(0))})
    state = {"model": Wrapped(model(1))}
    loaded = hvd.checkpoint.load(tmp_path / "it", state)
    assert loaded["model"] is state["model"]
    assert isinstance(loaded["model"], Wrapped)
    for ours, theirs in zip(loaded["model"].net.parameters(), model(0).parameters(), strict=True):
        assert torch.equal(ours, theirs)


KINDS: dict[str, Any] = {"numpy": np.float64, "tensor": torch.tensor, "float": float}


@pytest.mark.parametrize("here", KINDS)
@pytest.mark.parametrize("there", KINDS)
def test_rates_of_other_kinds(tmp_path: Path, there: str, here: str) -> None:
    """As load_state_dict() of PyTorch has it, a rate is loaded as it was saved."""

    def adam(kind: str, rate: float) -> dict[str, Any]:
        net = torch.nn.Linear(3, 2)
        optimizer: Any = torch.optim.Adam(net.parameters(), betas=(rate, rate))
        optimizer.param_groups[0]["lr"] = KINDS[kind](rate)
        net(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return {"net": net, "adam": optimizer}

    hvd.checkpoint.save(tmp_path / "it", adam(there, 0.5))
    state = adam(here, 0.25)
    hvd.checkpoint.load(tmp_path / "it", state)
    (group,) = state["adam"].param_groups
    assert group["lr"] == 0.5 and group["betas"] == (0.5, 0.5)
    assert isinstance(group["lr"], torch.Tensor if there == "tensor" else float)


@pytest.mark.parametrize("steps", [0, 1, 7])
def test_state_with_lists_of_tensors(tmp_path: Path, steps: int) -> None:
    """LBFGS has a list of directions, which grows; the oracle is PyTorch's own state dict."""

    def lbfgs(steps: int) -> dict[str, Any]:
        net = torch.nn.Linear(3, 2)
        optimizer = torch.optim.LBFGS(net.parameters(), max_iter=1)
        generator = torch.Generator().manual_seed(1)

        def loss() -> Any:
            optimizer.zero_grad()
            found = net(torch.randn(4, 3, generator=generator)).square().sum()
            found.backward()
            return found

        for _ in range(steps):
            optimizer.step(loss)
        return {"net": net, "lbfgs": optimizer}

    saved, fresh = lbfgs(4), lbfgs(steps)
    hvd.checkpoint.save(tmp_path / "it", saved)
    hvd.checkpoint.load(tmp_path / "it", fresh)
    torch.testing.assert_close(
        fresh["lbfgs"].state_dict(), saved["lbfgs"].state_dict(), rtol=0, atol=0
    )


class Counted(torch.nn.Linear):
    """A layer with a number, which its state dict has as a tensor."""

    count = 0

    def get_extra_state(self) -> Any:
        return torch.tensor(self.count)

    def set_extra_state(self, state: Any) -> None:
        self.count = int(state)


def copying_its_bias(inputs: int, outputs: int) -> Any:
    net: Any = torch.nn.Linear(inputs, outputs)
    net._register_state_dict_hook(
        lambda module, state, *others: state.update(bias=state["bias"].clone())
    )
    return net


@pytest.mark.parametrize("make", [Counted, copying_its_bias])
def test_a_module_gets_what_its_state_dict_has_as_copies(tmp_path: Path, make: Any) -> None:
    saved, fresh = make(3, 2), make(3, 2)
    saved.count = 7
    hvd.checkpoint.save(tmp_path / "it", {"net": saved})
    hvd.checkpoint.load(tmp_path / "it", {"net": fresh})
    assert torch.equal(fresh.bias, saved.bias) and torch.equal(fresh.weight, saved.weight)
    assert make is not Counted or fresh.count == 7


def test_an_optimizer_without_its_model_is_refused(tmp_path: Path) -> None:
    net = model(0)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    hvd.checkpoint.save(tmp_path / "it", {"net": net, "optimizer": optimizer})
    fresh = torch.optim.Adam(model(1).parameters())
    with pytest.raises(
        ValueError, match=r"optimizer.state.net.0.weight.*no parameter of that name"
    ):
        hvd.checkpoint.load(tmp_path / "it", {"optimizer": fresh})
    with pytest.raises(ValueError, match=r"'optimizer.state' of the state is empty"):
        hvd.checkpoint.load(tmp_path / "it", {"optimizer": fresh.state_dict()})


def test_refused_tensors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="to_dense"):
        hvd.checkpoint.save(tmp_path / "it", {"w": torch.eye(3).to_sparse()})
    with pytest.raises(ValueError, match=r"'a\.w': .*convert the tensor"):
        hvd.checkpoint.save(tmp_path / "it", {"a": {"w": torch.eye(3).to(torch.float8_e4m3fn)}})


def test_tensors_without_values_are_refused(tmp_path: Path) -> None:
    net = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ValueError, match=r"'net\.weight' is on the meta device.*to_empty"):
        hvd.checkpoint.save(tmp_path / "it", {"net": net})
    hvd.checkpoint.save(tmp_path / "it", {"net": torch.nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"'net\.weight' is on the meta device.*to_empty"):
        hvd.checkpoint.load(tmp_path / "it", {"net": net})
    assert hvd.checkpoint.infer_layout(net).keys() == {"weight", "bias"}


def test_whole_layouts_and_other_frameworks(tmp_path: Path) -> None:
    net = model(0)
    layouts = hvd.checkpoint.infer_layout(net)
    assert layouts["0.weight"] == Layout([1], [-1, -1])
    with pytest.raises(ValueError, match="need predict_data"):
        hvd.checkpoint.infer_layout(net, strategies={"0": ((1, 1), (1, 1))})
    assert hvd.checkpoint.infer_predict_layout(net)["2.bias"] == [[1], [-1], [4], 0, True, ""]
    hvd.checkpoint.save(tmp_path / "it", net, layouts)
    arrays = {"0.weight": np.zeros((12, 8), np.float32)}
    numpy_hvd.checkpoint.load(tmp_path / "it", arrays)
    assert np.array_equal(arrays["0.weight"], net[0].weight.detach().numpy())


def test_a_divided_state_is_saved_whole_for_any_number_of_ranks(tmp_path: Path) -> None:
    """The oracle is an optimizer whose state is whole, on the same ranks."""

    def start(rank: int, seed: int, **options: Any) -> dict[str, Any]:
        net = nets[rank][seed]
        adam = torch.optim.Adam(net.parameters(), 1e-2)
        return {
            "net": net,
            "adam": hvd.DistributedOptimizer(adam, net.named_parameters(), **options),
        }

    def step(rank: int, state: dict[str, Any]) -> None:
        state["adam"].zero_grad()
        inputs = torch.arange(16.0).reshape(2, 8) / (rank + 7)
        state["net"](inputs).square().mean().backward()
        state["adam"].step()

    def write(rank: int) -> Any:
        state = start(rank, 0, shard_state=True)
        step(rank, state)
        hvd.checkpoint.save(tmp_path / "it", state)
        return state["adam"].consolidate()

    def read(rank: int, **options: Any) -> Any:
        state = start(rank, 1, **options)
        hvd.checkpoint.load(tmp_path / "it", state)
        optimizer = state["adam"]
        found = optimizer.consolidate() if options else optimizer.state_dict()
        for number, entries in expected["state"].items():
            for name, value in entries.items():
                assert torch.equal(found["state"][number][name], value), (number, name)
        step(0, state)
        return torch.cat([each.detach().reshape(-1) for each in state["net"].parameters()])

    nets = [[model(seed) for seed in (0, 1)] for _ in range(3)]
    expected = run_ranks(3, write)[0]
    assert len(expected["state"]) == 6
    alone = run_ranks(1, read)[0]
    two = run_ranks(2, lambda rank: read(rank, shard_state=True))
    assert torch.allclose(two[0], alone) and torch.equal(two[0], two[1])


def test_a_part_of_a_divided_state_is_refused(tmp_path: Path) -> None:
    def main(rank: int) -> None:
        net = nets[rank]
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam(net.parameters()), net.named_parameters(), shard_state=True
        )
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with pytest.raises(
            ValueError, match=r"'adam' is the state_dict.*give the optimizer itself"
        ):
            hvd.checkpoint.save(tmp_path / "it", {"adam": optimizer.state_dict()})
        given = {"adam": optimizer} if rank else {"other": optimizer}
        with pytest.raises(hvd.HorovodInternalError, match=r"'other'.*rank 0 has a state that is"):
            hvd.checkpoint.save(tmp_path / "it", given)

    nets = [model(0) for _ in range(2)]
    run_ranks(2, main)
