"""Sharded parts of unusual modules, against one process, and what is refused in them."""

from __future__ import annotations

import copy
import math
import warnings
from functools import partial
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

import hvdlite.torch as hvd
from hvdlite.torch import sharding
from hvdlite.torch.sharding.dtensor import DTensor, Shard, distribute_tensor
from hvdlite.torch.sharding.leaves import Leaves

SHARE, WIDTH = 4, 8


def whole_batch() -> Any:
    return torch.arange(float(SHARE * hvd.size() * WIDTH)).reshape(-1, WIDTH).sin()


def own(batch: Any) -> Any:
    return batch[hvd.rank() * SHARE : (hvd.rank() + 1) * SHARE]


def expect(words: str, call: Any, *arguments: Any, kind: Any = ValueError, **options: Any) -> None:
    """The call raises an error of this kind that says these words."""
    try:
        call(*arguments, **options)
    except kind as error:
        assert words in str(error), error
    else:
        raise AssertionError(f"no error with {words!r}")


class Tied(torch.nn.Module):
    """Two names for one weight, and for one buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(WIDTH, WIDTH)
        self.second = torch.nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))
        self.first.register_buffer("same", self.scale, persistent=False)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x) * self.first.same) + self.scale


def check_tied() -> None:
    torch.manual_seed(3)
    model, batch = Tied(), whole_batch()
    expected = own(model(batch)).detach()
    cut = {"second.weight": (hvd.size(), 1)}
    sharded = sharding.shard(model, parameter_plan=cut, example=own(batch))
    assert torch.allclose(sharded(own(batch)), expected, atol=1e-5)
    assert sharded.second.weight is sharded.first.weight
    assert sharded.first.same is sharded.scale
    assert sharded.first.weight.to_local().shape == (WIDTH // hvd.size(), WIDTH)


def check_modules_without_parameters() -> None:
    batch = whole_batch()
    relu = sharding.shard(torch.nn.ReLU(), mesh=sharding.mesh())
    assert torch.equal(relu(own(batch)), own(batch).relu())


def check_meshes() -> None:
    """By default prime factors, so that neighbouring axes make up any number of parts."""
    size = hvd.size()
    assert math.prod(sharding.mesh().shape) == size
    assert all(f == 1 or all(f % d for d in range(2, f)) for f in sharding.mesh().shape)
    named = sharding.mesh((1, size), ("rows", "columns"))
    assert tuple(named["columns"].shape) == (size,)
    for shape, names, words in (
        ((size + 1,), None, f"has {size + 1} ranks, and the job has {size}"),
        ((1, size), ("a", "a"), "has 2 different names"),
        ((1, size), ("a",), "has 2 different names"),
    ):
        expect(words, sharding.mesh, shape, names)


def check_a_mesh_of_some_ranks() -> None:
    """A half of the ranks has a batch of its own, and shares of other sizes."""
    half = hvd.size() // 2
    mesh = init_device_mesh("cpu", (2, half), mesh_dim_names=("copy", "part"))["part"]
    copy, part = divmod(hvd.rank(), half)
    share = torch.arange((2.0 + copy) * WIDTH).reshape(-1, WIDTH) + part
    columns = sharding.shard(torch.square, ((1, half),), mesh=mesh)
    assert torch.equal(columns(share), share**2)
    if half > 1:
        expect(f"(1, {WIDTH}); (2, {WIDTH})", columns, torch.ones(1 + part, WIDTH))


def check_ranks_that_give_other_tensors() -> None:
    """All ranks are told, also where the numbers of all shapes in a row are the same."""
    size, first = hvd.size(), hvd.rank() == 0
    one, two = torch.ones(2, 3), (torch.ones(2), torch.ones(3))
    alike = (torch.ones(2, 3), torch.ones(4)), (torch.ones(2), torch.ones(3, 4))

    def part(*tensors: Any) -> Any:
        return tensors[0] * 2

    for given, words in (
        (alike[0 if first else 1], "(2, 3), (4,); (2,), (3, 4)"),
        ((one,) if first else two, "(2, 3); (2,), (3,)"),
        ((one,) if first else (), "(2, 3); no tensor"),
    ):
        for sharded in (sharding.shard(part), sharding.shard(part, ((size, 1),))):
            expect(words, sharded, *given)


def check_random_numbers() -> None:
    """Ranks with equal values draw equal numbers, others draw others, and each call new ones."""
    functional, size = torch.nn.functional, hvd.size()
    whole, rows = ((1, 1),), ((size, 1),)
    share = torch.ones(SHARE, 64)
    torch.manual_seed(hvd.rank())
    drawing = {
        "bernoulli_": torch.nn.Dropout(0.5),
        "rand": lambda x: x * torch.rand(64),
        "rand_like": lambda x: x + torch.rand_like(x),
        "rrelu_with_noise": lambda x: functional.rrelu(-x, training=True),
    }
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 5):
        # These cannot be traced without values there.
        del drawing["rrelu_with_noise"], drawing["rand_like"]
    for name, part in drawing.items():
        sharded = sharding.shard(part, whole, whole)
        first, second = sharded(share), sharded(share)
        assert torch.equal(first, hvd.broadcast(first, 0)), name
        assert not torch.equal(first, second), name
    dropout = sharding.shard(torch.nn.Dropout(0.5), rows)
    kept = dropout(share)
    assert set(kept.unique().tolist()) == {0.0, 2.0}
    of_ranks = hvd.allgather(kept[None])
    assert all(not torch.equal(of_ranks[0], each) for each in of_ranks[1:])
    state = torch.get_rng_state()
    first = dropout(share)
    torch.set_rng_state(state)
    assert torch.equal(first, dropout(share)), "an activation checkpoint draws the same again"
    attention = functional.scaled_dot_product_attention
    quiet = [
        torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.ReLU()),
        torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.ReLU()).eval(),
        functional.rrelu,
        lambda x: attention(x[None], x[None], x[None])[0],
    ]  # fmt: skip
    for part in quiet:
        sharded = sharding.shard(part, whole)
        with torch.inference_mode():
            assert sharded(share).shape == share.shape
        state = torch.get_rng_state()
        assert sharded(share).shape == share.shape
        assert torch.equal(state, torch.get_rng_state()), "nothing is drawn"


def check_operators_without_a_rule() -> None:
    """DTensor has none for `renorm`: each rank gets the whole of its input, and is told."""
    size, share = hvd.size(), torch.eye(3).repeat(2, 1, 1) * (hvd.rank() + 2)

    def part(x: Any) -> Any:
        return torch.renorm(x, 2, 0, 1.0)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = sharding.shard(part, ((size, 1, 1),))(share)
    assert torch.allclose(output, part(share))
    told = [str(each.message) for each in caught if "renorm runs on whole" in str(each.message)]
    assert f"receives {share.nbytes * (size - 1)} bytes" in told[0], told


def scaled(x: Any, scale: float = 2.0, shift: Any = None, *, sign: int = 1) -> Any:
    return sign * (x * scale if shift is None else x * scale + shift)


def check_strategies_of_operators() -> None:
    """An operator that no module has is cut by its name; the answer is that of one process."""
    torch.manual_seed(4)
    size = hvd.size()
    layer = torch.nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True)
    batch = torch.randn(SHARE * size, 3, 8)
    expected = own(layer(batch)).detach()
    heads = {"self_attn.scaled_dot_product_attention": ((1, size, 1, 1),) * 3}
    sharded = sharding.shard(layer, example=own(batch), strategies=heads)
    assert torch.allclose(sharded(own(batch)), expected, atol=1e-5)
    longer = torch.randn(SHARE * size, 5, 8)
    assert sharded(own(longer)).shape == (SHARE, 5, 8), "another shape is planned again"
    tanh = sharding.shard(torch.relu, strategies={"tanh": ((1, 1),)})
    expect("'tanh', which is no operator", tanh, own(whole_batch()))


def check_ranks_that_plan_differently() -> None:
    """All ranks are told, also where only one of them cannot plan."""
    size, first = hvd.size(), hvd.rank() == 0
    mine: Any = ((size, 1),) if first else ((1, size),)
    broken: Any = ((size, 1, 1),) if first else ((size, 1),)
    alone = "would fit" if first else "rank 0 cannot plan"
    for strategy, words in ((mine, "plan a sharded part differently"), (broken, alone)):
        expect(words, sharding.shard(torch.relu, strategy), own(whole_batch()))


def check_arguments_by_keyword() -> None:
    batch = whole_batch()
    share, cuts = own(batch), (1, hvd.size())
    part = sharding.shard(scaled, (cuts, cuts))
    assert torch.equal(part(shift=share, x=share), share * 3)
    one = sharding.shard(scaled, (cuts,))
    assert torch.equal(one(share, scale=5.0), share * 5)
    for wrong, error, words in (
        (lambda: one(share, sign=2), TypeError, "'sign' only by keyword"),
        (lambda: one(share, factor=2), TypeError, "factor"),
        (lambda: one(share, shift=share), ValueError, "planned for 1 tensors is called with 2"),
    ):
        expect(words, wrong, kind=error)


def check_outputs_are_numbered_alike() -> None:
    """A tensor that is made of no input counts, as in the plan."""
    batch = whole_batch()
    part = sharding.shard(lambda x: (torch.ones(3), x.square()), None, (None, (1, hvd.size())))
    ones, columns = part(own(batch))
    assert torch.equal(ones, torch.ones(3))
    assert torch.equal(columns, batch.square().chunk(hvd.size(), 1)[hvd.rank()])


def check_a_second_try() -> None:
    """What a refused plan leaves is the module as it was."""
    layer, batch = torch.nn.Linear(WIDTH, WIDTH), whole_batch()
    expected = own(layer(batch)).detach()
    wrong = {"": ((1, 1), (1, WIDTH + 1))}
    expect("would fit", sharding.shard, layer, example=own(batch), strategies=wrong)
    assert not hasattr(layer.weight, "to_local") and torch.equal(own(layer(batch)), expected)
    part = sharding.shard(layer, example=own(batch), strategies={"": ((1, 1), (1, hvd.size()))})
    assert torch.allclose(part(own(batch)), expected, atol=1e-5)


class Holder(torch.nn.Module):
    """A parameter that is cut by rows, and the leaves of a part that uses it."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (hvd.size(),))
        self.weight = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)]))
        self.leaves = Leaves(self, ["weight"])

    def local(self) -> Any:
        (found,) = self.leaves.local_tensors()
        return found

    def grad_after(self, *graphs: Any) -> Any:
        self.weight.grad = None
        for each in graphs:
            each.sum().backward()
        assert self.weight.grad is None or type(self.weight.grad) is DTensor
        return None if self.weight.grad is None else self.weight.grad.to_local()


def check_gradients_of_parameters() -> None:
    """They are DTensors, cut and laid out as `to_local` has them of a plain gradient."""
    whole = torch.arange(float(hvd.size() * 6)).reshape(-1, 3)
    holders = Holder(whole), Holder(whole)
    calls = holders[0].local, lambda: holders[1].weight.to_local(grad_placements=[Shard(0)])
    for holder, local in zip(holders, calls, strict=True):
        factor = torch.arange(6.0).reshape(3, 2).t()  # The gradient has other strides.
        for _ in range(2):
            (local() * factor).sum().backward()
        with torch.no_grad():
            assert local().data_ptr() == holder.weight._local_tensor.data_ptr()
    ours, torchs = (each.weight.grad for each in holders)
    assert type(ours) is DTensor
    assert ours.placements == torchs.placements and ours.shape == torchs.shape
    assert torch.equal(ours.to_local(), 2 * factor)
    assert torch.equal(ours.full_tensor(), torchs.full_tensor())
    assert ours.to_local().stride() == ours.stride() == (3, 1)
    (apart,) = torch.autograd.grad(holders[0].local().sum(), [holders[0].weight])
    for each in (apart + ours, ours + apart, copy.deepcopy(apart), copy.copy(apart)):
        assert type(each) is DTensor and each.placements == ours.placements


def check_parameters_that_change_between_calls() -> None:
    """Each call has what its parameters are then, and gradients go to these."""
    holder = Holder(torch.ones(hvd.size() * 2, 3))
    first = holder.local()
    ones = torch.ones_like(first).detach()
    assert torch.equal(holder.grad_after(first * 2, holder.local() * 3), 5 * ones)
    twin = copy.deepcopy(holder)
    assert torch.equal(twin.grad_after(twin.local() * 2), 2 * ones)
    assert torch.equal(holder.weight.grad.to_local(), 5 * ones)
    seen = []
    holder.weight.register_post_accumulate_grad_hook(lambda each: seen.append(each.grad))
    assert torch.equal(holder.grad_after(holder.local()), ones) and len(seen) == 1
    holder.weight.requires_grad_(False)
    assert not holder.local().requires_grad
    holder.weight.requires_grad_(True)
    assert torch.equal(holder.grad_after(holder.local()), ones)
    old = holder.weight
    holder.weight = torch.nn.Parameter(old.detach() * 4)
    assert torch.equal(holder.local(), 4 * ones)
    assert torch.equal(holder.grad_after(holder.local() * 2), 2 * ones)
    assert torch.equal(old.grad.to_local(), ones)
    holder.double()
    assert holder.grad_after(holder.local()).dtype == torch.float64


class Noted(torch.autograd.Function):
    """An input, which notes whether a parameter has a gradient when its own comes."""

    @staticmethod
    def forward(ctx: Any, x: Any, holder: Holder, seen: list[bool]) -> Any:
        ctx.noted = holder, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        holder, seen = ctx.noted
        seen.append(holder.weight.grad is not None)
        return gradients[0], None, None


def check_gradients_of_parameters_come_before_those_of_inputs() -> None:
    """FSDP2 takes them when the gradient of an input has come."""
    holder, seen = Holder(torch.ones(hvd.size() * 2, 3)), []
    for _ in range(3):
        x = torch.ones(2, 3, requires_grad=True)
        holder.grad_after(Noted.apply(x, holder, seen) * holder.local())
    assert seen == [True] * 3, seen


def check_second_derivatives_are_refused() -> None:
    """Exchanges of gradients have no gradients, and the share of a rank would count once more."""
    layer, share = torch.nn.Linear(WIDTH, WIDTH), own(whole_batch()).requires_grad_()
    cuts = {"": ((1, 1), (1, hvd.size()))}
    for part in (
        sharding.shard(layer, example=share, strategies=cuts), sharding.shard(lambda x: x**3)
    ):  # fmt: skip
        output = part(share)
        twice = partial(torch.autograd.grad, output.square().sum(), share, create_graph=True)
        expect("a sharded part has no second derivatives", twice, kind=RuntimeError)


CHECKS = [
    check_tied,
    check_modules_without_parameters,
    check_meshes,
    check_a_mesh_of_some_ranks,
    check_ranks_that_give_other_tensors,
    check_random_numbers,
    check_strategies_of_operators,
    check_ranks_that_plan_differently,
    check_operators_without_a_rule,
    check_arguments_by_keyword,
    check_outputs_are_numbered_alike,
    check_a_second_try,
    check_gradients_of_parameters,
    check_parameters_that_change_between_calls,
    check_second_derivatives_are_refused,
    check_gradients_of_parameters_come_before_those_of_inputs,
]
