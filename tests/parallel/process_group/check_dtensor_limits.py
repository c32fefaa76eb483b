"""Where DTensor ends: what it refuses, what it does otherwise than one thinks, and its way out."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.parallel.process_group.check_dtensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    whole,
)
from tests.parallel.process_group.features import Skipped, feature


@feature(2)
def what_dtensor_refuses() -> None:
    mesh = init_device_mesh("cpu", (2,))
    named = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rows", "columns"))
    tensor = whole(1, 4, 4)
    cut = distribute_tensor(tensor, mesh, [Shard(0)])
    calls: list[tuple[Any, str, Callable[[], object]]] = [
        (ValueError, "same length", lambda: distribute_tensor(tensor, named, [Shard(0)])),
        ((IndexError, AssertionError), "", lambda: distribute_tensor(tensor, mesh, [Shard(5)])),
        (RuntimeError, "bigger", lambda: init_device_mesh("cpu", (4,))),
        (RuntimeError, "unique",
         lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "a"))),
        (RuntimeError, "same length",
         lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("a",))),
        (KeyError, "Invalid mesh_dim_name", lambda: named["depth"]),
        (RuntimeError, "mixed torch.Tensor and DTensor", lambda: cut + tensor),
        (RuntimeError, "Partial", lambda: cut.redistribute(mesh, [Partial()])),
    ]  # fmt: skip
    for kind, text, call in calls:
        with pytest.raises(kind, match=text):
            call()
    with module("experimental").implicit_replication():
        assert torch.equal((cut + tensor).full_tensor(), 2 * tensor)
    partial = distribute_tensor(tensor, mesh, [Partial()])
    assert torch.equal(partial.full_tensor(), tensor)


def module(name: str) -> Any:
    """A module of DTensor's, which older releases have elsewhere or not at all."""
    try:
        return import_module(f"torch.distributed.tensor.{name}")
    except ImportError:
        raise Skipped(f"this release has no torch.distributed.tensor.{name}") from None


@feature()
def dtensor_takes_the_values_of_rank_0() -> None:
    mesh = init_device_mesh("cpu", (size := dist.get_world_size(),))
    own = torch.full((2 * size, 2), float(dist.get_rank()))
    for placement in (Shard(0), Replicate()):
        assert not distribute_tensor(own, mesh, [placement]).full_tensor().any()


@feature(4)
def dtensor_places_a_block_as_mindspore_does() -> None:
    """x [S0, R] times w1 [R, S1], relu, times w2 [R, S0]: partial sums, one reduce_scatter."""
    comm_debug_mode = module("debug").CommDebugMode
    mesh = init_device_mesh("cpu", (2, 2))
    x, w1, w2, bias = whole(1, 8, 8), whole(2, 8, 8), whole(3, 8, 8), whole(4, 8)
    hidden = distribute_tensor(x, mesh, [Shard(0), Replicate()]) @ distribute_tensor(
        w1, mesh, [Replicate(), Shard(1)]
    )
    assert list(hidden.placements) == [Shard(0), Shard(1)]
    active = hidden.relu()
    assert list(active.placements) == [Shard(0), Shard(1)]
    sums = active @ distribute_tensor(w2, mesh, [Replicate(), Shard(0)])
    assert list(sums.placements) == [Shard(0), Partial()]
    with comm_debug_mode() as counted:
        output = sums.redistribute(mesh, [Shard(0), Shard(1)])
        output = output + distribute_tensor(bias, mesh, [Replicate(), Shard(0)])
    assert list(output.placements) == [Shard(0), Shard(1)]
    counts = {str(name): count for name, count in counted.get_comm_counts().items()}
    assert [n for name, n in counts.items() if "reduce_scatter" in name] == [1], counts
    assert not [name for name in counts if "all_reduce" in name], counts
    expected = (x @ w1).relu() @ w2 + bias
    torch.testing.assert_close(output.full_tensor(), expected, atol=1e-5, rtol=1e-5)


@feature()
def dtensor_gathers_to_cut_another_dimension() -> None:
    """On a CPU mesh, until `hvdlite.torch.sharding` gives it an alltoall."""
    comm_debug_mode = module("debug").CommDebugMode
    mesh = init_device_mesh("cpu", (size := dist.get_world_size(),))
    tensor = whole(5, 4 * size, 4 * size)
    rows = distribute_tensor(tensor, mesh, [Shard(0)])
    with comm_debug_mode() as counted:
        columns = rows.redistribute(mesh, [Shard(1)])
    assert [str(name) for name in counted.get_comm_counts()] == [
        "c10d_functional.all_gather_into_tensor"
    ]
    assert torch.equal(columns.to_local(), tensor.chunk(size, 1)[dist.get_rank()])


@feature(2)
def dtensor_runs_functions_and_operators_of_ones_own() -> None:
    experimental = module("experimental")
    if not hasattr(experimental, "register_sharding"):
        raise Skipped("this release has no register_sharding")
    mesh = init_device_mesh("cpu", (2,))
    tensor = whole(6, 4, 6)
    cut = distribute_tensor(tensor, mesh, [Shard(0)])
    local = experimental.local_map(
        lambda part: part - part.mean(1, keepdim=True), out_placements=[Shard(0)],
        in_placements=([Shard(0)],), device_mesh=mesh,
    )  # fmt: skip
    torch.testing.assert_close(local(cut).full_tensor(), tensor - tensor.mean(1, keepdim=True))

    @torch.library.custom_op("hvdlite_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    @experimental.register_sharding(torch.ops.hvdlite_tests.twice.default)  # type: ignore[untyped-decorator]
    def _(x: Any) -> Any:
        return [([Shard(0)], [Shard(0)]), ([Replicate()], [Replicate()])]

    result = torch.ops.hvdlite_tests.twice(cut)
    assert isinstance(result, DTensor) and list(result.placements) == [Shard(0)]
    assert torch.equal(result.full_tensor(), 2 * tensor)


@feature(2)
def one_optimizer_steps_over_parameters_that_are_cut() -> None:
    mesh = init_device_mesh("cpu", (2,))
    values = whole(7, 6, 3)
    alone = nn.Parameter(values.clone())
    cut = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    for parameter in (alone, cut):
        optimizer = torch.optim.AdamW([parameter], lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            parameter.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(cut.full_tensor(), alone, atol=1e-6, rtol=0)
