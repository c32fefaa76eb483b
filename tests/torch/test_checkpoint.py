"""Checkpoints of PyTorch: models, optimizers, parts of tensors, DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hvdlite.numpy as numpy_hvd
import hvdlite.torch as hvd
from tests.ranks import run_ranks

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
    hvd.checkpoint.save(tmp_path / "it", state)
    fresh = {name: torch.zeros_like(value) for name, value in state.items()}
    hvd.checkpoint.load(tmp_path / "it", fresh)
    assert all(torch.equal(fresh[name], value) for name, value in state.items())


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
    with pytest.raises(ValueError, match="convert the tensor"):
        hvd.checkpoint.save(tmp_path / "it", {"w": torch.eye(3).to(torch.float8_e4m3fn)})


def test_whole_layouts_and_other_frameworks(tmp_path: Path) -> None:
    net = model(0)
    layouts = hvd.checkpoint.infer_layout(net)
    assert layouts["0.weight"] == Layout([1], [-1, -1])
    assert hvd.checkpoint.infer_predict_layout(net)["2.bias"] == [[1], [-1], [4], 0, True, ""]
    hvd.checkpoint.save(tmp_path / "it", net, layouts)
    arrays = {"0.weight": np.zeros((12, 8), np.float32)}
    numpy_hvd.checkpoint.load(tmp_path / "it", arrays)
    assert np.array_equal(arrays["0.weight"], net[0].weight.detach().numpy())
