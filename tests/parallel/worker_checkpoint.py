"""A rank that saves or loads a model and an optimizer whose tensors are DTensors.

python -m tests.parallel.worker_checkpoint (save | load) FOLDER ROWS
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import hvdlite.torch as hvd
from hvdlite.torch.sharding.dtensor import DTensor, Replicate, Shard, distribute_tensor


def build(placements: list[Any], mesh: Any) -> tuple[Any, Any]:
    """A model with weights that do not divide among the ranks, and its optimizer."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Linear(10, 3))
    for layer in model:
        weight = distribute_tensor(layer.weight.data, mesh, placements)
        layer.weight = torch.nn.Parameter(weight)
    return model, torch.optim.Adam(model.parameters(), 0.1)


def step(model: Any, optimizer: Any) -> None:
    """A step whose gradients are the values."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()


def whole(tensors: dict[str, Any]) -> dict[str, Any]:
    """The tensors as each rank would hold them without DTensors."""
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in tensors.items()
    }


def main(call: str, folder: Path, rows: int) -> None:
    hvd.init_process_group()
    mesh = init_device_mesh("cpu", (rows, hvd.size() // rows))
    state: dict[str, Any] = {"step": 0, "loss": np.float64(0), "counts": np.zeros(3, np.int64)}
    if call == "save":
        state["model"], state["optimizer"] = build([Shard(0), Shard(1)], mesh)
        step(state["model"], state["optimizer"])
        state |= {"step": 11, "loss": np.float64(1.5), "counts": np.arange(3)}
        refuse_float8(folder, state["model"][0].weight)
        hvd.checkpoint.save(folder / "dcp", state)
        hvd.checkpoint.save(folder / "whole", whole(state["model"].state_dict()))
        step(state["model"], state["optimizer"])
        hvd.checkpoint.save(folder / "next", whole(state["model"].state_dict()))
    else:
        state["model"], state["optimizer"] = build([Shard(1), Replicate()], mesh)
        for value in state["model"].state_dict().values():
            value.zero_()
        hvd.checkpoint.load(folder / "dcp", state)
        assert state["step"] == 11
        assert state["loss"] == 1.5 and isinstance(state["loss"], np.float64)
        assert state["counts"].tolist() == [0, 1, 2]
        check(folder / "whole", state["model"])
        step(state["model"], state["optimizer"])
        check(folder / "next", state["model"])
        for value in state["model"].state_dict().values():
            value.zero_()
        # DTensors take their parts of plain safetensors, too.
        hvd.checkpoint.load(folder / "whole", state["model"])
        check(folder / "whole", state["model"])
        refuse(folder, state, mesh)
    check_fsdp(call, folder)
    dist.destroy_process_group()
    sys.stdout.write("is content\n")


def refuse_float8(folder: Path, weight: Any) -> None:
    """What no load would take is not written."""
    state = {"weight": weight, "scale": torch.ones(2).to(torch.float8_e4m3fn)}
    try:
        hvd.checkpoint.save(folder / "float8", state)
    except ValueError as error:
        assert "'scale': checkpoints have no torch.float8" in str(error), error
    else:
        raise AssertionError("float8 was saved")


def check(folder: Path, model: Any) -> None:
    """The model has the values of a checkpoint of whole tensors."""
    values = whole(model.state_dict())
    expected = {name: torch.zeros_like(value) for name, value in values.items()}
    hvd.checkpoint.load(folder, expected)
    for name, value in values.items():
        assert torch.equal(value, expected[name]), name


def check_fsdp(call: str, folder: Path) -> None:
    """A model under FSDP2 goes on where another number of ranks has stopped, to the bit."""
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # before torch 2.6
        return
    torch.manual_seed(1 if call == "save" else 2)
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.Linear(9, 5))
    fully_shard(model, mesh=init_device_mesh("cpu", (hvd.size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    state = {"model": model, "optimizer": optimizer}

    def step(value: float) -> None:
        model(torch.full((4, 7), value)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    if call == "save":
        step(1.0)
        hvd.checkpoint.save(folder / "fsdp", state)
        step(2.0)
        hvd.checkpoint.save(folder / "fsdp next", whole(model.state_dict()))
    else:
        hvd.checkpoint.load(folder / "fsdp", state)
        step(2.0)
        check(folder / "fsdp next", model)


def refuse(folder: Path, state: dict[str, Any], mesh: Any) -> None:
    """All ranks raise errors of ours where DCP would wrap, or convert silently."""
    weight = state["model"][0].weight.detach()
    wrong: list[tuple[type[Exception], str, dict[str, Any]]] = [
        (KeyError, "did you mean model.0.weight", {"model.0.wieght": weight}),
        (ValueError, "is float64 here", {"model.0.weight": weight.double()}),
        (ValueError, "(6, 10) here", {"model.0.weight": weight.T}),
    ]
    for kind, text, entries in wrong:
        try:
            hvd.checkpoint.load(folder / "dcp", entries)
        except kind as error:
            assert text in str(error), error
        else:
            raise AssertionError(text)
    if hvd.rank() == 0:
        shutil.copytree(folder / "dcp", folder / "damaged")
        file = min((folder / "damaged").glob("*.distcp"))
        file.write_bytes(file.read_bytes()[:40])
    hvd.barrier()
    try:
        hvd.checkpoint.load(folder / "damaged", state)
    except (ValueError, hvd.HorovodInternalError) as error:
        assert ".distcp is damaged" in str(error), error
    else:
        raise AssertionError("a damaged file was loaded")
    try:
        hvd.checkpoint.save(folder / "new", state, {"model.0.weight": [[2], [0, -1]]})
    except ValueError as error:
        assert "say themselves how they are cut" in str(error), error


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
