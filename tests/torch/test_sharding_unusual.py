"""Parts that are not the usual ones: recurrent layers, biases of heads, experts, on 5 ranks."""

from __future__ import annotations

import gc
import re
import weakref
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from hvdlite.torch.sharding.collectives import MeshCollectives
from tests.torch.sharded_ranks import check_against_one_process, run_sharded

pytestmark = pytest.mark.usefixtures("float64")


class First(nn.Module):
    """The first result of a layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Any) -> Any:
        return self.layer(x)[0]


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    """They take lists of tensors, also where they draw random numbers."""
    inputs = [torch.randn(6, 4, 5)]
    check_against_one_process(First(kind(5, 6, 2, batch_first=True)), inputs, {}, 3)
    part = First(kind(5, 6, 2, dropout=0.5, batch_first=True))
    found = run_sharded(part, inputs, {}, 3, lambda output, _: output.sum())
    of_ranks = torch.cat([each[0] for each in found.outputs])
    assert of_ranks.shape == (6, 4, 6) and not torch.equal(of_ranks, part(*inputs))


class Biased(nn.Module):
    """Attention with a bias of each head that falls with the distance of words."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.slopes = nn.Parameter(torch.rand(heads, 1, 1))

    def forward(self, x: Any) -> Any:
        places = torch.arange(float(x.shape[2]))
        bias = (places[None] - places[:, None]).abs() * -self.slopes
        return functional.scaled_dot_product_attention(x, x * 2, x.tanh(), attn_mask=bias)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_biases_of_heads(ranks: int) -> None:
    heads, words = (1, ranks, 1, 1), (1, 1, ranks, 1)
    batch = [torch.randn(ranks, ranks, 2 * ranks, 4)]
    for cuts, bias in ((heads, (ranks, 1, 1)), (words, (1, ranks, 1))):
        given = {"scaled_dot_product_attention": (cuts, cuts, cuts, bias)}
        check_against_one_process(Biased(ranks), batch, given, ranks)


class Experts(nn.Module):
    """Two of three experts for each word, by what a gate says."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 3, bias=False)
        self.experts = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        values, which = self.gate(x).topk(2, -1)
        shares = torch.zeros(*x.shape[:2], 3).scatter(-1, which, values.softmax(-1))
        return sum(shares[..., i, None] * each(x) for i, each in enumerate(self.experts))


@pytest.mark.parametrize("ranks", [3, 5])
def test_experts(ranks: int) -> None:
    given = {f"experts.{i}": ((1, 1, 1), (1, ranks)) for i in range(2)}
    given["experts.2"] = ((1, 1, ranks), (ranks, 1))
    check_against_one_process(Experts(2 * ranks), [torch.randn(ranks, 4, 2 * ranks)], given, ranks)


class Called(nn.Module):
    """A function as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.forward = function


def _set(x: Any) -> Any:
    made = x * 1
    made[:, [0, 2]] = made[:, [1, 3]] * 2
    return made


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, [0, 2, 1, 3]],
        lambda x: x * x[[0, 1, 3, 3]],
        lambda x: x[:, [[0, 1], [2, 2]]] * x[:, np.array([1, 1]), None],
        lambda x: x[..., range(2)].sum() + x[:, []].sum() + x,
        _set,
    ],
)
def test_lists_in_an_index(function: Any) -> None:
    for cuts in ((2, 1, 1), (1, 2, 1), (1, 1, 2)):
        check_against_one_process(Called(function), [torch.randn(4, 4, 4)], {"input0": (cuts,)}, 2)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sum(0), lambda x: x.mean(dim=-1), lambda x: x.amax(0), lambda x: x.cumsum(0),
        lambda x: x.logsumexp(0), lambda x: x.argmax(0) + x, lambda x: x.any(0) + x,
        lambda x: x.index_select(0, torch.tensor([0])), lambda x: x.softmax(0), lambda x: x.flip(0),
        lambda x: x.max(0).values, lambda x: x.sort(0).values, lambda x: x.std(0, False),
        lambda x: x.prod(0, True), lambda x: x.norm(dim=0), lambda x: x.median(0).values,
    ],
)  # fmt: skip
def test_a_tensor_without_dimensions_is_reduced_along_none(function: Any) -> None:
    called = Called(lambda x: function((x * x).sum()) * x)
    check_against_one_process(called, [torch.randn(4, 3)], {}, 2)


def test_many_lists_in_indexes_are_told_apart() -> None:
    """Each becomes a tensor that ends at once, in whose place in memory the next one may lie."""

    def turn(x: Any) -> Any:
        for first in range(40):
            made = x * 1
            made[:, [first % 4, (first + 1) % 4]] = x[:, [(first + 2) % 4, (first + 3) % 4]]
            x = made + x
        return x / x.norm()

    check_against_one_process(Called(turn), [torch.randn(4, 4, 4)], {"input0": ((2, 1, 1),)}, 2)


def test_tensors_without_values_are_refused() -> None:
    nowhere = torch.empty(3, device="meta")
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) that has no values"):
        run_sharded(Called(lambda x: x * nowhere), [torch.randn(4, 3)], {}, 2, lambda *_: 0)


@pytest.mark.parametrize("dim", [0, 1])
def test_repeated_elements_whose_number_is_given(dim: int) -> None:
    part = Called(lambda x: x.repeat_interleave(2, dim=dim, output_size=8))
    given = {"repeat_interleave": (((2, 1), (1, 2))[dim],)}
    check_against_one_process(part, [torch.randn(4, 4)], given, 2)


def test_groups_that_were_destroyed_are_not_kept() -> None:
    """The collectives of a part find the groups of the next default group, and hold none."""
    fake = pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    collectives = None
    for _ in range(2):
        dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=3)
        try:
            collectives = collectives or MeshCollectives()
            groups = [collectives._group(members) for members in ((0, 1, 2), (0, 1))]
            assert groups[0] is dist.group.WORLD and groups[1] is collectives._group((0, 1))
            known = [weakref.ref(each) for each in groups]
            del groups
        finally:
            dist.destroy_process_group()
        gc.collect()
        assert [each() for each in known] == [None, None]


class Shifted(nn.Module):
    """A gradient that reaches a weight, of which it is summed, and an input, of which it is not."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.rand(1, width))

    def forward(self, x: Any) -> Any:
        return (x.tanh() + self.shift).sin()


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_gradient_that_is_summed_for_one_of_its_receivers(ranks: int) -> None:
    """Each rank has a row, so that the weight and the input get one and the same tensor."""
    check_against_one_process(
        Shifted(4), [torch.randn(ranks, 4)], {"add": ((ranks, 1), (1, 1))}, ranks
    )


def test_a_bias_whose_gradient_is_that_of_the_only_row() -> None:
    """The weight is too large for its sum to be taken together with the bias's."""
    part = nn.Sequential(nn.Linear(256, 300), nn.Tanh())
    check_against_one_process(part, [torch.randn(2, 256)], {"0": ((2, 1), (1, 1))}, 2)


class Checkpointed(nn.Module):
    """A layer that keeps no activations, between two others."""

    def __init__(self, reentrant: bool, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.reentrant = reentrant

    def forward(self, x: Any) -> Any:
        first, second, third = self.layers
        return third(checkpoint(second, first(x).tanh(), use_reentrant=self.reentrant).tanh())


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_activations(reentrant: bool) -> None:
    given = {"layers.0": ((1, 1), (1, 2)), "layers.1": ((1, 2), (2, 1))}
    result = check_against_one_process(Checkpointed(reentrant, 4), [torch.randn(4, 4)], given, 2)
    assert len(result.gradients) == 6
    calls: list[Any] = []  # Outside of parts checkpoints are as they were: backward runs it again.
    x = torch.ones(2, requires_grad=True)
    found = checkpoint(lambda x: calls.append(x) or x.exp(), x, use_reentrant=reentrant)
    found.sum().backward()
    assert len(calls) == 2


class Keeping(nn.Module):
    """A layer that keeps what a function makes of its output."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.layer, self.keep = nn.Linear(4, 4), keep
        self.register_buffer("steps", torch.ones(()))
        self.plain, self.cache, self.last = torch.zeros(4), {}, None

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        self.keep(self, y)
        return y * self.steps


@pytest.mark.parametrize(
    ("name", "keep"),
    [
        ("steps gets", lambda self, y: setattr(self, "steps", self.steps + 1)),
        ("plain gets", lambda self, y: setattr(self, "plain", self.plain + 1)),
        ("last gets", lambda self, y: setattr(self, "last", y.mean())),
        ("last gets", lambda self, y: setattr(self, "last", (self.layer.weight * 2, 3))),
        ("cache['y'] gets", lambda self, y: self.cache.update(y=y)),
        ("changes a tensor in place that is neither", lambda self, y: self.plain.add_(y.mean(0))),
        ("changes a tensor in place that is neither", lambda self, y: self.plain[:2].add_(1)),
    ],
)
def test_what_a_call_would_keep_is_refused(name: str, keep: Any) -> None:
    module = nn.Sequential(Keeping(keep))
    before = dict(vars(module[0]))
    with pytest.raises(ValueError, match=re.escape(name)):
        run_sharded(module, [torch.randn(4, 4)], {}, 2, lambda *_: 0)
    assert vars(module[0]) == before and not module[0].cache


class Rotated(nn.Module):
    """Tables of cosines that are made when a longer sequence comes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("speeds", torch.rand(4))
        self.cache: dict[int, Any] = {}
        self.longest, self.table = 0, None

    def forward(self, x: Any) -> Any:
        words = x.shape[1]
        if words > self.longest:
            self.longest, self.table = words, (torch.arange(words)[:, None] * self.speeds).sin()
        if words not in self.cache:
            self.cache[words] = torch.arange(float(words)).cos()[:, None]
        return self.layer(x) * self.cache[words] + self.table[:words]


def test_tables_that_are_kept_are_made_in_each_plan() -> None:
    part = Rotated()
    for shape in ((2, 3, 4), (4, 3, 4), (4, 5, 4), (4, 2, 4)):
        check_against_one_process(part, [torch.randn(shape)], {}, 2)
    assert not part.cache and part.longest == 0


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_weight_that_torch_computes_before_each_call() -> None:
    part = nn.utils.weight_norm(nn.Linear(4, 4))
    run_sharded(part, [torch.randn(4, 4)], {}, 2, lambda output, _: output.sum())
    assert not part.weight.is_meta


class Averaged(nn.Module):
    """A layer with a running mean of what it makes, which takes no part in gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        mean = y.mean(0)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(mean, alpha=0.1)
        return y * self.mean


def _detached(x: Any) -> Any:
    y = x.tanh()
    y.detach_()
    return x.sin() * y


@pytest.mark.parametrize("make", [Averaged, lambda: Called(_detached)])
def test_what_takes_no_part_in_gradients(make: Any) -> None:
    part = make()
    for cuts in ((2, 1), (1, 2)):
        found = check_against_one_process(part, [torch.randn(4, 4)], {"input0": (cuts,)}, 2)
        assert set(found.buffers) == {name for name, _ in part.named_buffers()}


@pytest.mark.parametrize("cuts", [((1, 1), (2, 1)), ((2, 1), (1, 1)), ((1, 2), (1, 1))])
def test_a_table_with_sparse_gradients(cuts: Any) -> None:
    """They are those of a DTensor, and no sparse ones."""
    table, words = nn.Embedding(8, 4, padding_idx=3, sparse=True), torch.randint(8, (4, 3))
    dense = nn.Embedding(8, 4, padding_idx=3, _weight=table.weight.detach())
    (dense(words).sin().sum() / 2).backward()  # The average of two losses.
    found = run_sharded(table, [words], {"": cuts}, 2, lambda output, _: output.sin().sum())
    torch.testing.assert_close(found.gradients["weight"], dense.weight.grad)


def test_results_that_hide_tensors_are_refused() -> None:
    def part(x: Any) -> Any:
        return {"sum": x.sum(1), "beside": (1, 2.0, "a", None, True, torch.float32)}, [Hidden(x)]

    class Hidden:
        def __init__(self, tensor: Any) -> None:
            self.tensor = tensor

    with pytest.raises(ValueError, match="a sharded part returns a Hidden, whose tensors"):
        run_sharded(Called(part), [torch.randn(4, 3)], {}, 2, lambda *_: 0)
    run_sharded(Called(lambda x: part(x)[0]), [torch.randn(4, 3)], {}, 2, lambda *_: 0)


class Mixed(nn.Module):
    """Layers of which one runs in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)]).float()

    def forward(self, x: Any) -> Any:
        first, second, third = self.layers
        x = first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = second(x)
            with torch.autocast("cpu", enabled=False):
                z = third(x)
        return y, z


@pytest.mark.parametrize("cuts", [((1, 1), (1, 2)), ((1, 2), (2, 1)), ((2, 1), (1, 1))])
def test_autocast_inside_of_a_part(cuts: Any) -> None:
    part, x = Mixed(), torch.randn(4, 8, dtype=torch.float32)
    found = run_sharded(part, [x], {"layers.1": cuts}, 2, lambda output, _: output.float().sum())
    expected = part(x)
    (sum(each.float().sum() for each in expected) / 2).backward()
    for index, wanted in enumerate(expected):
        whole = torch.cat([each[index] for each in found.outputs])
        torch.testing.assert_close(whole, wanted.detach(), rtol=0.02, atol=0.02)
    for name, parameter in part.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad, rtol=0.02, atol=0.02)
