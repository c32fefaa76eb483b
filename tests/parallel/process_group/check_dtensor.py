"""DTensor, its redistributions and tensor parallelism, against the same by one process."""

from __future__ import annotations

import itertools
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.parallel.process_group import models
from tests.parallel.process_group.features import Skipped, feature

try:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
except ImportError:  # Its place before torch 2.5.
    from torch.distributed._tensor import (  # type: ignore[no-redef]
        DTensor,
        Partial,
        Replicate,
        Shard,
        distribute_tensor,
    )


def whole(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@feature()
def dtensor_matmul_and_redistribution() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    left, right = whole(1, 8, 12), whole(2, 12, 8)
    kinds = (Replicate(), Shard(0), Shard(1))
    for one, other in itertools.product(kinds, kinds):
        a, b = distribute_tensor(left, mesh, [one]), distribute_tensor(right, mesh, [other])
        torch.testing.assert_close((a @ b).full_tensor(), left @ right, atol=1e-5, rtol=1e-5)
        moved = distribute_tensor(left, mesh, [one]).redistribute(mesh, [other])
        assert torch.equal(moved.full_tensor(), left)
        assert moved.placements == (other,)


@feature()
def dtensor_partial_and_uneven() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    own = torch.full((6, 4), float(rank + 1))
    total = torch.full((6, 4), float(sum(range(1, size + 1))))
    for placement in (Replicate(), Shard(0), Shard(1)):
        partial = DTensor.from_local(own, mesh, [Partial()], run_check=False)
        assert torch.equal(partial.redistribute(mesh, [placement]).full_tensor(), total)
    for rows in (5, 7, 3, 10):
        tensor = whole(rows, rows, 3)
        cut = distribute_tensor(tensor, mesh, [Shard(0)])
        expected = list(tensor.chunk(size))
        mine = expected[rank] if rank < len(expected) else tensor[:0]
        assert torch.equal(cut.to_local(), mine)
        assert torch.equal(cut.full_tensor(), tensor)
        assert torch.equal((cut * 2).full_tensor(), tensor * 2)


@feature(4)
def dtensor_two_dimensions() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    flat = init_device_mesh("cpu", (4,))
    tensor = whole(3, 8, 8)
    cut = distribute_tensor(tensor, mesh, [Shard(0), Shard(1)])
    assert cut.to_local().shape == (4, 4)
    assert torch.equal(cut.full_tensor(), tensor)
    torch.testing.assert_close((cut @ cut).full_tensor(), tensor @ tensor)
    rows = distribute_tensor(tensor, flat, [Shard(0)])  # Two meshes in one job.
    assert torch.equal(rows.full_tensor(), cut.full_tensor())
    assert cut.redistribute(mesh, [Shard(1), Shard(0)]).full_tensor().equal(tensor)


@feature(4)
def tensor_parallel() -> None:
    """Column-wise and row-wise layers, five steps of Adam."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = parallelize_module(
        models.make_model(),
        mesh,
        {"0": ColwiseParallel(), "2": RowwiseParallel()},
    )
    batches = [models.make_batch(step) for step in range(5)]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    models.train(model, optimizer, batches)
    models.close(model, models.trained_alone(5), 5e-6)


@feature(4)
def tensor_parallel_inside_fsdp() -> None:
    from tests.parallel.process_group.check_fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    model: nn.Module = models.make_model()
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh["model"], plan)
    fully_shard(model, mesh=mesh["data"])
    row = mesh.get_local_rank("data")
    batches = [models.part(step, row, 2) for step in range(2)]
    models.train(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), batches)
    alone = models.make_model()
    whole_batches = [models.make_batch(step) for step in range(2)]
    models.train(alone, torch.optim.SGD(alone.parameters(), lr=0.1), whole_batches)
    models.close(model, alone, 1e-6)


def counted_calls() -> Any:
    """What counts the collectives of DTensors."""
    try:
        return import_module("torch.distributed.tensor.debug").CommDebugMode()
    except ImportError:
        raise Skipped("this release has no torch.distributed.tensor.debug") from None


@feature()
def dtensor_takes_the_values_of_rank_0() -> None:
    mesh = init_device_mesh("cpu", (size := dist.get_world_size(),))
    own = torch.full((2 * size, 2), float(dist.get_rank()))
    for placement in (Shard(0), Replicate()):
        assert not distribute_tensor(own, mesh, [placement]).full_tensor().any()


@feature(4)
def dtensor_places_a_block_as_mindspore_does() -> None:
    """x [S0, R] times w1 [R, S1], relu, times w2 [R, S0]: partial sums, one reduce_scatter."""
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
    with counted_calls() as counted:
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
    mesh = init_device_mesh("cpu", (size := dist.get_world_size(),))
    tensor = whole(5, 4 * size, 4 * size)
    rows = distribute_tensor(tensor, mesh, [Shard(0)])
    with counted_calls() as counted:
        columns = rows.redistribute(mesh, [Shard(1)])
    assert [str(name) for name in counted.get_comm_counts()] == [
        "c10d_functional.all_gather_into_tensor"
    ]
    assert torch.equal(columns.to_local(), tensor.chunk(size, 1)[dist.get_rank()])
