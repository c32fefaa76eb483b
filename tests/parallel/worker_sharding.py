"""A rank that trains a model of which a part is sharded, and the same model as one process.

python -m tests.parallel.worker_sharding FOLDER
"""

from __future__ import annotations

import copy
import math
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import hvdlite.torch as hvd
from hvdlite.common.layouts.layout import from_cuts
from hvdlite.common.layouts.transfer import bytes_to_receive
from hvdlite.torch import sharding
from hvdlite.torch.sharding.dtensor import DTensor, Shard, distribute_tensor
from tests.parallel import sharding_edges
from tests.parallel.sharding_edges import expect

SHARE, WIDTH = 8, 16


def block(seed: int) -> Any:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
    )


def batches(size: int) -> Any:
    """The same batches of all ranks, everywhere."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SHARE * size, WIDTH, generator=generator) for _ in range(3)]


def own(batch: Any) -> Any:
    return batch[hvd.rank() * SHARE : (hvd.rank() + 1) * SHARE]


def train_as_one_process(first: Any, middle: Any, last: Any) -> list[Any]:
    parameters = [*first.parameters(), *middle.parameters(), *last.parameters()]
    optimizer = torch.optim.SGD(parameters, 0.5)
    outputs = []
    for batch in batches(hvd.size()):
        output = last(middle(first(batch)))
        optimizer.zero_grad()
        output.square().mean().backward()
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def train_with_a_sharded_part(first: Any, middle: Any, last: Any) -> list[Any]:
    optimizer = torch.optim.SGD(
        [*first.parameters(), *middle.parameters(), *last.parameters()], 0.5
    )
    outputs = []
    for batch in batches(hvd.size()):
        output = last(middle(first(own(batch))))
        optimizer.zero_grad()
        output.square().mean().backward()
        for module in (first, last):  # what DistributedOptimizer does
            for index, parameter in enumerate(module.parameters()):
                parameter.grad = hvd.allreduce(parameter.grad, name=f"gradient.{index}")
        optimizer.step()
        outputs.append(output.detach())
    return outputs


def check_training() -> None:
    modules = [torch.nn.Linear(WIDTH, WIDTH), block(1), torch.nn.Linear(WIDTH, WIDTH)]
    for module in modules:
        hvd.broadcast_parameters(module.state_dict(), 0)
    expected_modules = copy.deepcopy(modules)
    expected = train_as_one_process(*expected_modules)
    middle = modules[1]
    sharding.set_strategy(middle[0], ((2, 1), (1, hvd.size() // 2)))
    names = [name for name, _ in middle.named_parameters()]
    modules[1] = sharding.shard(middle, example=torch.empty(SHARE, WIDTH, device="meta"))
    outputs = train_with_a_sharded_part(*modules)
    assert all(torch.allclose(a, own(b), atol=1e-5) for a, b in zip(outputs, expected, strict=True))
    assert [name for name, _ in middle.named_parameters()] == names
    for here, there in zip(middle.parameters(), expected_modules[1].parameters(), strict=True):
        assert isinstance(here, DTensor)
        assert torch.allclose(here.full_tensor(), there, atol=1e-5)
    local = middle[0].weight.to_local().shape
    assert local == (WIDTH * 2 // hvd.size(), WIDTH), local


class ReceivedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts what a rank receives in DTensor's collectives, by the sizes of their results."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.received = 0.0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # It is asked again for what DTensor makes of the operator.
        result = function(*args, **(kwargs or {}))
        name = str(function)
        if "c10d_functional" not in name or "wait" in name or "wrap" in name:
            return result
        nbytes = result.numel() * result.element_size()
        group = args[-1]
        if isinstance(group, str):
            group = dist.distributed_c10d._resolve_process_group(group)
        n = group.size()
        if "all_gather" in name or "all_to_all" in name:
            self.received += nbytes * (n - 1) / n
        elif "reduce_scatter" in name:
            self.received += nbytes * (n - 1)
        elif "all_reduce" in name:
            self.received += 2 * nbytes * (n - 1) / n
        else:
            raise AssertionError(name)
        return result


def check_bytes() -> None:
    """The two layers move no more than the plan says: DTensor scatters the sums."""
    mesh = sharding.mesh()
    model, batch = block(2), batches(hvd.size())[0]
    sharding.set_strategy(model[0], ((2, 1), (1, hvd.size() // 2)))
    found = sharding.plan(model, batch, mesh=mesh)
    sharding.shard(model, mesh=mesh, example=own(batch))
    inputs = distribute_tensor(batch, mesh, sharding.placements(found.inputs[0], mesh))
    with torch.no_grad(), ReceivedBytes() as counted:
        output = torch.nn.Sequential.forward(model, inputs)
        local = output.to_local()
        output.redistribute(mesh, sharding.placements((2, hvd.size() // 2), mesh)).to_local()
    assert local.numel() > 0
    # The first DTensors choose other ways between placements.
    if torch.__version__ >= "2.10":
        assert 0 < counted.received <= found.bytes, (counted.received, found.bytes)


def check_another_dimension() -> None:
    """Rows become columns, and the gradients rows, by an alltoall; also where sizes differ."""
    size = hvd.size()
    flat = sharding.mesh((size,))
    for shape in ((16, 32), (5, 7), (3, 2)):
        whole = torch.randn(shape, generator=torch.Generator().manual_seed(6))
        rows = distribute_tensor(whole, flat, [Shard(0)]).requires_grad_()
        with ReceivedBytes() as counted:
            columns = rows.redistribute(flat, [Shard(1)])
        expected = distribute_tensor(whole, flat, [Shard(1)])
        assert torch.equal(columns.to_local(), expected.to_local())
        padded = 4 * math.prod(-(-each // size) * size for each in shape)
        assert counted.received == padded * (size - 1) / size**2, counted.received
        (columns * expected).to_local().sum().backward()
        assert torch.equal(rows.grad.to_local(), rows.to_local())
    layouts = [from_cuts(cuts, size) for cuts in ((size, 1), (1, size))]
    assert bytes_to_receive(*layouts, (16, 32), 4) == 16 * 32 * 4 * (size - 1) / size**2


def check_inference(folder: Path) -> None:
    """A checkpoint of whole tensors, loaded into parts; the result is that of one process."""
    model, batch = block(5), batches(hvd.size())[2]
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.checkpoint.save(folder / "whole", model)
    expected = model(batch)
    sharded = block(6)
    sharding.set_strategy(sharded[0], ((1, 1), (1, hvd.size())))
    sharded = sharding.shard(sharded, example=own(batch))
    hvd.checkpoint.load(folder / "whole", sharded)
    with torch.inference_mode():
        assert torch.allclose(sharded(own(batch)), own(expected), atol=1e-6)
    layouts = hvd.checkpoint.infer_layout(
        block(6), batch, strategies={"0": ((1, 1), (1, hvd.size()))}, mesh=sharding.mesh()
    )
    assert layouts["0.weight"].cuts == (hvd.size(), 1)
    hvd.checkpoint.save(folder / "parts", sharded)
    again = block(7)
    hvd.checkpoint.load(folder / "parts", again)
    assert torch.equal(again[0].weight, model[0].weight)


def check_functions() -> None:
    weight = torch.nn.Parameter(torch.eye(WIDTH) * 2)
    double = sharding.shard(lambda x, w: torch.relu(x) @ w, ((hvd.size(), 1), (1, 1)))
    batch = batches(hvd.size())[1]
    output = double(own(batch), weight)
    assert torch.allclose(output, own(torch.relu(batch) * 2))
    output.sum().backward()
    columns = sharding.shard(torch.relu, ((1, hvd.size()),), ((1, hvd.size()),))
    piece = WIDTH // hvd.size()
    mine = torch.relu(batch)[:, hvd.rank() * piece : (hvd.rank() + 1) * piece]
    assert torch.equal(columns(own(batch)), mine)
    # Each rank has the whole output, and a loss of its own: their gradients add up.
    everywhere = sharding.shard(torch.relu, ((1, hvd.size()),), ((1, 1),))
    share = own(batch).clone().requires_grad_()
    output = everywhere(share)
    assert torch.equal(output, torch.relu(batch))
    ((hvd.rank() + 1) * output.sum()).backward()
    total = sum(range(1, hvd.size() + 1))
    assert torch.equal(share.grad, total * (share > 0))
    expect("share of the batch of equal size", columns, torch.ones(2 + hvd.rank(), WIDTH))


def check_parameter_plan() -> None:
    """Parameters that are cut otherwise than the plan says give the same values."""
    model, batch = torch.nn.Sequential(block(8), torch.nn.LayerNorm(WIDTH)), batches(hvd.size())[0]
    hvd.broadcast_parameters(model.state_dict(), 0)
    expected = own(model(batch)).detach()
    columns = {"0.0.weight": (1, hvd.size())}
    sharded = sharding.shard(model, parameter_plan=columns, example=own(batch))
    assert torch.allclose(sharded(own(batch)), expected, atol=1e-5)
    assert sharded[0][0].weight.to_local().shape == (WIDTH, WIDTH // hvd.size())
    for wrong in ({"0.9.weight": (1, 1)}, {"0.0.weight": (WIDTH * 2, 1)}):
        expect("", sharding.shard, block(1), parameter_plan=wrong, example=own(batch))


def check_middle_operators() -> None:
    """What a submodule is called with is cut as its strategy says, whatever comes to it."""
    size = hvd.size()
    model, batch = block(9), batches(size)[0]
    hvd.broadcast_parameters(model.state_dict(), 0)
    expected = own(model(batch)).detach()
    sharding.set_strategy(model[0], ((1, 1), (1, size)))
    sharding.set_strategy(model[1], ((size, 1),))
    mesh = sharding.mesh()
    found = sharding.plan(model, batch, mesh=mesh)
    assert found["1"].strategy == ((size, 1),), found
    sharding.shard(model, mesh=mesh, example=own(batch))
    output = model(own(batch))
    assert torch.allclose(output, expected, atol=1e-5)
    output.sum().backward()
    assert model[0].weight.grad is not None
    inside = torch.nn.Sequential(MadeInside())
    hvd.broadcast_parameters(inside.state_dict(), 0)
    expected = own(inside(batch)).detach()
    sharding.set_strategy(inside[0], ((1, size),))
    sharding.shard(inside, mesh=mesh, example=own(batch))
    assert torch.allclose(inside(own(batch)), expected, atol=1e-5)


class MadeInside(torch.nn.Module):
    """A module whose own operator works on what its submodule has made."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return torch.relu(self.inner(x))


def check_convolutions() -> None:
    """DTensor's own are wrong where the width is cut; here samples and channels are."""
    torch.manual_seed(4)
    size = hvd.size()
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 8, 3, padding=1), torch.nn.BatchNorm2d(8))
    expected = copy.deepcopy(model)
    images = torch.randn(2 * size, 2, 6, 8)
    part = images[2 * hvd.rank() : 2 * hvd.rank() + 2]
    wanted = expected(images)[2 * hvd.rank() : 2 * hvd.rank() + 2]
    channels = copy.deepcopy(model)
    sharding.set_strategy(channels[0], ((1, 1, 1, 1), (size, 1, 1, 1)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sharded in (
            sharding.shard(model, ((1, 1, 1, size),), example=part),
            sharding.shard(channels, example=part),
        ):
            assert torch.allclose(sharded(part), wanted, atol=1e-5)
            norm = sharded[1]
            assert torch.allclose(norm.running_var.full_tensor(), expected[1].running_var)
            assert norm.num_batches_tracked.full_tensor() == 1
    assert channels[0].weight.to_local().shape[0] == 8 // size


if __name__ == "__main__":
    hvd.init_process_group()
    check_training()
    check_bytes()
    check_another_dimension()
    check_functions()
    check_parameter_plan()
    check_middle_operators()
    check_convolutions()
    check_inference(Path(sys.argv[1]))
    for check in sharding_edges.CHECKS:
        check()
    dist.destroy_process_group()
    sys.stdout.write("is content\n")
