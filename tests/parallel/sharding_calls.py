"""What a sharded part is given, by calls and state dicts, and what it refuses of that.

python -m tests.parallel.sharding_calls
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate

import hvdlite.torch as hvd
from hvdlite.common.runtime.current import current
from hvdlite.torch import sharding
from hvdlite.torch.process_group.weights import watch_optimizers
from hvdlite.torch.sharding import runner
from hvdlite.torch.sharding.dtensor import Shard, distribute_tensor
from hvdlite.torch.sharding.sharded_module import cut_what_is_loaded
from tests.parallel import sharding_steps
from tests.parallel.sharding_edges import SHARE, WIDTH, expect, own, whole_batch


def check_arguments_of_other_kinds() -> None:
    """What DTensor or Python would refuse in their own words is refused in ours."""
    example, n = own(whole_batch()), hvd.size()

    def part(**options: Any) -> Any:
        return sharding.shard(torch.nn.Linear(WIDTH, WIDTH), example=example, **options)

    cut = {"": ((1, 1), (1, n))}
    assigned, sharded = part(strategies=cut), part(strategies=cut)
    assigned.weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH))
    distributed = distribute_tensor(whole_batch(), init_device_mesh("cpu", (n,)), [Shard(0)])
    whole = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())
    sharding.shard(whole, example=example, strategies={"0": ((1, 1), (1, n))})
    limits = {"search": "dynamic_programming", "memory_limit": "1 GB"}
    for words, call in {
        "parameter_plan['weight']: a strategy has ints": lambda: part(
            parameter_plan={"weight": [Shard(0)]}
        ),
        "parameter_plan['weight']: layout": lambda: part(parameter_plan={"weight": (n + 1, 1)}),
        "mesh is a DeviceMesh": lambda: part(mesh=(n,)),
        "memory_limit is an int": lambda: part(**limits),
        "give this rank's share of the batch": lambda: sharded(distributed),
        "weight has come into a sharded part as": lambda: assigned(example),
        "0 is a part of a module that shard() has cut": lambda: whole[0](example),
    }.items():
        expect(words, call, kind=(TypeError, ValueError))


def check_whole_values_are_loaded() -> None:
    """Each rank takes its part of a plain state dict, also of a model around the part."""
    for assign in (False, True):
        plain = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
        hvd.broadcast_parameters(plain.state_dict(), 0)
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH))
        cut: Any = {"": ((1, 1), (1, hvd.size()))}
        sharding.shard(model[0], example=own(whole_batch()), strategies=cut)
        model.load_state_dict(plain.state_dict(), assign=assign)
        assert model[0].weight.to_local().shape == (WIDTH // hvd.size(), WIDTH)
        found, wanted = model(own(whole_batch())), plain(own(whole_batch()))
        assert torch.allclose(found, wanted, atol=1e-5), assign
        other = {"0.weight": torch.ones(3, WIDTH)}
        load = partial(model.load_state_dict, other, strict=False)
        expect("size mismatch for 0.weight", load, kind=RuntimeError)


def check_few_rows_and_another_dtype_are_loaded() -> None:
    """FSDP2 cuts fewer rows than there are ranks, too; what is assigned keeps its dtype."""
    mesh, whole = init_device_mesh("cpu", (hvd.size(),)), torch.arange(3.0 * WIDTH).view(3, WIDTH)
    part = torch.nn.Linear(WIDTH, 3, bias=False)
    held = distribute_tensor(torch.zeros(3, WIDTH).bfloat16(), mesh, [Shard(0)])
    part.weight = torch.nn.Parameter(held)
    state = {"model.weight": whole}
    cut_what_is_loaded(part, state, "model.")
    part.load_state_dict({"weight": state["model.weight"]}, assign=True)
    assert part.weight.dtype == part.weight._spec.tensor_meta.dtype == torch.float32
    assert torch.equal((part.weight * 2).full_tensor(), whole * 2)


def check_weights_are_compared() -> None:
    """HVDLITE_CHECK_WEIGHTS: of two parts with equal names, a value that one rank changes."""
    runtime = current()
    config, runtime.config = runtime.config, replace(runtime.config, check_weights=2)
    watch_optimizers()
    try:
        first, second = (sharding_steps.Network().sharded() for _ in range(2))
        parameters = [*first.part.parameters(), *second.part.parameters()]
        optimizer = sharding.local_step(torch.optim.SGD(parameters, 0.05))
        batch = sharding_steps.own(sharding_steps.whole_batch())
        for step in range(1, 5):
            if (hvd.rank(), step) == (1, 4):
                with torch.no_grad():
                    second.part.scale.to_local().add_(1)
            optimizer.zero_grad()
            (first.loss(batch) + second.loss(batch)).backward()
            if step < 4:
                optimizer.step()
        expect("diverged at step 4: ranks 0 and 1 differ", optimizer.step, kind=RuntimeError)
    finally:
        runtime.config = config


def check_shapes_are_planned_once() -> None:
    """A last batch and a growing sequence are planned when they come, and never again."""
    made, plan = [], runner.plan

    def counted(*args: Any, **options: Any) -> Any:
        made.append(args)
        return plan(*args, **options)

    torch.manual_seed(5)
    model = torch.nn.Linear(WIDTH, WIDTH)
    whole = torch.randn(SHARE * hvd.size(), 3, WIDTH)
    shares = [own(whole)[:, :length] for length in (3, 1, 2, 3, 2, 1, 1)]
    expected = [model(each).detach() for each in shares]
    runner.plan = counted
    try:
        sharding.shard(model, example=shares[0], strategies={"": ((1, 1, 1), (1, hvd.size()))})
        found = [model(each) for each in shares]
    finally:
        runner.plan = plan
    assert len(made) == 3, len(made)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def check_values_beside_tensors() -> None:
    """What is in the plan of a call is never used for another; ranks that differ are told."""
    part = sharding.shard(lambda x, values, places: x[places] * float(values[0]))
    shares, ends = torch.ones(hvd.size(), WIDTH), slice(None)
    kept = np.array([5.0])
    found = [part(shares, np.array([each]), ends)[0, 0] for each in (2.0, 3.0, 4.0)]
    found.append(part(shares, kept, ends)[0, 0])
    kept[0] = 6.0
    found.append(part(shares, kept, slice(None))[0, 0])
    assert found == [2, 3, 4, 5, 6], found
    signed = sharding.shard(lambda x, sign: x.copysign(torch.full((), sign)))
    assert [signed(shares, sign)[0, 0] for sign in (0.0, -0.0, 0.0)] == [1, -1, 1]
    known = np.array([2.0 if hvd.rank() else 7.0])
    for words, call in {
        "rank 1 of the mesh has called": lambda: part(shares, known, ends),
        "with a bytearray, which may change": lambda: part(shares, bytearray(b"a"), ends),
        "rank 0 cannot plan" if hvd.rank() else "with a bytearray": lambda: part(
            shares, np.array([8.0]) if hvd.rank() else bytearray(b"a"), ends
        ),
    }.items():
        expect(words, call, kind=Exception)
    assert part(shares, np.array([4.0]), ends)[0, 0] == 4


def check_ranks_that_call_differently() -> None:
    """All ranks are told, also where each has a plan for its call, or would refuse it alone."""
    part = sharding.shard(torch.nn.Dropout(0.5), ((hvd.size(), 1),))
    scaled = sharding.shard(lambda x, scale: (x * scale).sum(0), ((1, hvd.size()),))
    share, first = torch.ones(2, hvd.size()), hvd.rank() == 0
    mesh = init_device_mesh("cpu", (hvd.size(),))
    placed = distribute_tensor(torch.ones(2, hvd.size()), mesh, [Replicate()])
    for training in (False, True):
        part.train(training)
        for each in (share, share.double()):
            part(each)
    for scale in (1, 2):
        scaled(share, scale)
    for call in (
        lambda: part(share if first else share.double()),
        lambda: part(share if first else placed),
        lambda: scaled(share, 1 if first else 2),
        lambda: part.train(first)(share),
    ):
        expect("ranks 0 and 1 of the mesh call a sharded part with", call)
    assert scaled(share, 2).sum() == 4 * hvd.size()


class Turned(torch.nn.Module):
    """Angles of places that are exact, whatever the model around the part computes in."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.register_buffer("speeds", 0.3 ** torch.arange(float(WIDTH)))

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            places = torch.arange(1000.0, 1000.0 + x.shape[1])
            angles = places[:, None] @ self.speeds[None]
        return self.layer(x) * angles.sin()


def check_autocast() -> None:
    """What a part casts otherwise than its caller is cast so, also where it was planned before."""
    model, whole = Turned(), torch.randn(SHARE * hvd.size(), 3, WIDTH)
    hvd.broadcast_parameters(model.state_dict(), 0)
    whole = hvd.broadcast(whole, 0, name="whole")
    with torch.autocast("cpu"), torch.no_grad():
        expected = model(whole)
        sharding.shard(
            model, example=own(whole), strategies={"layer": ((1, 1, 1), (1, hvd.size()))}
        )
        with torch.autocast("cpu", enabled=False):
            exact = model(own(whole))
        found = model(own(whole))
    assert found.dtype == expected.dtype and exact.dtype == torch.float32
    torch.testing.assert_close(found, own(expected), rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(exact, own(expected), rtol=2e-2, atol=2e-2)


def check_what_parameters_carry() -> None:
    """Their attributes and hooks are those from before, and buffers without values are told."""
    model, seen = torch.nn.Linear(WIDTH, WIDTH), []
    model.weight.no_decay = True
    model.weight.register_hook(seen.append)
    model.bias.register_post_accumulate_grad_hook(seen.append)
    sharding.shard(model, example=own(whole_batch()))
    model(own(whole_batch())).sum().backward()
    assert model.weight.no_decay and len(seen) == 2 and any(each is model.bias for each in seen)
    with torch.device("meta"):
        turned = torch.nn.Linear(WIDTH, 2)
        turns = torch.empty(1, dtype=torch.complex64)
        turned.register_buffer("turns", turns, persistent=False)
        turned.forward = lambda x: torch.view_as_complex(x[:, :2]) * turned.turns
    sharding.shard(turned, example=own(whole_batch()))
    expect("turns has no values", turned, own(whole_batch()))


class Scaled(torch.nn.Module):
    """Has a tensor that is neither a parameter nor a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = torch.nn.Linear(WIDTH, WIDTH), torch.tensor(1.0)

    def forward(self, x: Any) -> Any:
        return self.inner(x) * 0 + self.scale


def check_attributes_that_are_replaced() -> None:
    """Each call has the tensor that the module has then, whatever shapes were planned before."""
    part = sharding.shard(Scaled(), example=own(whole_batch()))
    found = []
    for scale in (1.0, 5.0, 1.0):
        part.scale = torch.tensor(scale)
        found += [float(part(torch.ones(rows, WIDTH))[0, 0]) for rows in (1, 2, 1)]
        part.scale.fill_(7.0)
        found.append(float(part(torch.ones(1, WIDTH))[0, 0]))
    assert found == [1, 1, 1, 7, 5, 5, 5, 7, 1, 1, 1, 7], found


CHECKS = [
    check_attributes_that_are_replaced,
    check_ranks_that_call_differently,
    check_autocast,
    check_what_parameters_carry,
    check_values_beside_tensors,
    check_shapes_are_planned_once,
    check_whole_values_are_loaded,
    check_few_rows_and_another_dtype_are_loaded,
    check_arguments_of_other_kinds,
    check_weights_are_compared,  # Last: optimizers are watched from here on, which takes time.
]

if __name__ == "__main__":
    hvd.init_process_group()
    for check in CHECKS:
        check()
    dist.destroy_process_group()
    sys.stdout.write("is content\n")
