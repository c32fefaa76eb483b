"""Sharded transformers on 2 to 8 ranks as threads equal one process: outputs and all gradients."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdlite.common.layouts.operators import candidates
from hvdlite.torch import sharding
from tests.torch.sharded_ranks import (
    Mesh,
    Result,
    ThreadCollectives,
    check_against_one_process,
    run_sharded,
)  # fmt: skip

RANKS = [2, 3, 4, 6, 8]
BATCH, WORDS, WIDTH, HEADS = 24, 6, 48, 24

pytestmark = pytest.mark.usefixtures("float64")


class Attention(nn.Module):
    """Attention with heads, by a projection for each of query, key and value."""

    def __init__(self, kv_heads: int = HEADS, causal: bool = True) -> None:
        super().__init__()
        self.kv_heads, self.causal, self.width = kv_heads, causal, WIDTH // HEADS
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, kv_heads * self.width)
        self.v = nn.Linear(WIDTH, kv_heads * self.width)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        def heads(tensor: Any, count: int) -> Any:
            return tensor.view(*tensor.shape[:2], count, self.width).transpose(1, 2)

        query, key, value = (
            heads(self.q(x), HEADS),
            *(
                heads(each(x), self.kv_heads).repeat_interleave(HEADS // self.kv_heads, 1)
                for each in (self.k, self.v)
            ),
        )
        found = functional.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.out(found.transpose(1, 2).reshape(x.shape))


class Block(nn.Module):
    """A block of GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.n1(x))
        return x + self.down(functional.gelu(self.up(self.n2(x)), approximate="tanh"))


class Llama(nn.Module):
    """A block of Llama: grouped heads, rotary positions, RMSNorm, gated feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(kv_heads=HEADS // 2)
        self.n1, self.n2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        angles = torch.outer(torch.arange(WORDS), torch.arange(1.0, WIDTH // 2 + 1))
        self.register_buffer("cos", torch.cat([angles, angles], -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat([angles, angles], -1).sin(), persistent=False)

    def rotated(self, x: Any) -> Any:
        first, second = x.chunk(2, -1)
        half = torch.cat([-second, first], -1)
        return x * self.cos[: x.shape[1]] + half * self.sin[: x.shape[1]]

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.rotated(self.n1(x)))
        h = self.n2(x)
        return x + self.down(functional.silu(self.gate(h)) * self.up(h))


class Language(nn.Module):
    """Words to a loss: embedding, block, and the embedding once more as output."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WIDTH, WIDTH)
        self.places = nn.Embedding(WORDS, WIDTH)
        self.block = Block()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: Any, target: Any) -> Any:
        at = torch.arange(words.shape[1], device=words.device)
        x = self.block(self.words(words) + self.places(at))
        logits = self.head(x)
        return functional.cross_entropy(logits.view(-1, WIDTH), target.reshape(-1)), logits


def columns(n: int) -> Any:
    return ((1, 1, 1), (1, n))


def rows(n: int) -> Any:
    return ((1, 1, n), (n, 1))


def of_attention(n: int, prefix: str = "") -> dict[str, Any]:
    return {**{f"{prefix}{name}": columns(n) for name in "qkv"}, f"{prefix}out": rows(n)}


def of_block(n: int) -> dict[str, Any]:
    return {**of_attention(n, "attention."), "up": columns(n), "down": rows(n)}


def batch(*shape: int) -> Any:
    return torch.randn(*(shape or (BATCH, WORDS, WIDTH)))


@pytest.mark.parametrize("ranks", [3, 8])
def test_columns_and_rows(ranks: int) -> None:
    block = Block()
    found = check_against_one_process(block, [batch()], of_block(ranks), ranks)
    assert found.mesh == (ranks,), "one axis does"
    assert found.plan.layouts["up.weight"].cuts == (ranks, 1)
    assert found.plan.layouts["attention.out.weight"].cuts == (1, ranks)
    assert found.plan["n2"].bytes == found.plan["add"].bytes == 0, "a norm's words are cut before"
    for name in ("attention.scaled_dot_product_attention", "attention.view"):
        heads = found.plan[name].strategy[0]
        assert ranks in heads, (name, heads)


def test_what_two_blocks_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """As much as by hand: words are gathered and summed twice in a block, and the same back.

    Query, key and value come from one gather, which the plan counts once. Of all gradients that
    ranks add for norms and biases the sums are one exchange, of none that is not trained.
    """
    calls: list[str] = []
    ranks = 4

    def counted(name: str) -> Any:
        exchange = getattr(ThreadCollectives, name)

        def run(self: Any, *args: Any, **options: Any) -> Any:
            if self.rank == 0:
                calls.append(name)
            return exchange(self, *args, **options)

        return run

    for name in ("allreduce", "allgather", "reducescatter", "alltoall"):
        monkeypatch.setattr(ThreadCollectives, name, counted(name))
    blocks = nn.Sequential(Block(), Block())
    blocks[0].n1.requires_grad_(False)
    cuts = {f"{i}.{name}": cut for i in range(2) for name, cut in of_block(ranks).items()}
    found = check_against_one_process(blocks, [batch()], cuts, ranks)
    assert calls.count("allgather") == calls.count("reducescatter") == 8
    assert calls.count("allreduce") == 1
    assert calls.count("alltoall") == 4, "the batch is cut anew at both ends, forward and back"
    gathered = {name: found.plan[f"0.attention.{name}"].bytes for name in "qkv"}
    assert gathered == {"q": batch().nbytes * (ranks - 1) // ranks, "k": 0, "v": 0}
    assert not {"0.n1.weight", "0.n1.bias"} & set(found.gradients)


@pytest.mark.parametrize(("ranks", "rows_of_mesh"), [(4, 2), (6, 2), (6, 3)])
def test_batch_and_columns(ranks: int, rows_of_mesh: int) -> None:
    a, b = rows_of_mesh, ranks // rows_of_mesh
    strategies = {
        "up": ((a, 1, 1), (1, b)), "down": ((a, 1, b), (b, 1)), "attention.q": columns(ranks),
    }  # fmt: skip
    found = check_against_one_process(Block(), [batch()], strategies, ranks)
    assert found.plan["up"].strategy == strategies["up"]
    assert found.plan["attention.q"].strategy == strategies["attention.q"]


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_block_of_llama(ranks: int) -> None:
    cuts = of_attention(ranks, "attention.") | {
        "gate": columns(ranks), "up": columns(ranks), "down": rows(ranks),
    }  # fmt: skip
    check_against_one_process(Llama(), [batch()], cuts, ranks)
    check_against_one_process(Llama(), [batch()], {}, ranks)


@pytest.mark.parametrize(
    ("cut", "ranks"), [("rows", 3), ("columns", 4), ("classes", 3), ("classes", 4), ("nothing", 6)]
)
def test_words_to_a_loss(cut: str, ranks: int) -> None:
    """The tied weight is used by words and by classes, and its gradients are added."""
    given: dict[str, Any] = {
        "rows": {"words": ((ranks, 1), (1, 1))},
        "columns": {"words": ((1, ranks), (1, 1))},
        "classes": {"head": columns(ranks), "cross_entropy_loss": ((1, ranks), (1,))},
        "nothing": {},
    }[cut]
    words = torch.randint(WIDTH, (BATCH, WORDS))
    target = torch.randint(WIDTH, (BATCH, WORDS))
    target[:, -1] = -100
    strategies = given | {f"block.{k}": v for k, v in of_block(ranks).items()}
    found = check_against_one_process(Language(), [words, target], strategies, ranks)
    if cut == "classes":
        assert found.plan["cross_entropy_loss"].strategy == ((1, ranks), (1,))


class Many(nn.Module):
    """Operators that a transformer may have besides."""

    def __init__(self) -> None:
        super().__init__()
        self.group = nn.GroupNorm(12, WIDTH)
        self.batch = nn.BatchNorm1d(WORDS)
        self.prelu = nn.PReLU(WORDS)

    def forward(self, x: Any) -> Any:
        x = self.prelu(nn.ReLU(inplace=True)(x * 2) - x)
        x = self.group(x.transpose(1, 2)).mT + x.mean(-1, keepdim=True) + x.amax(1, keepdim=True)
        x = self.batch(x)
        first, second, third = x.split([8, 16, 24], -1)
        x = torch.cat([third, first, second], -1) * torch.stack([first, -first])[1].sum()
        y = torch.einsum("bsh,bth->bst", x, x).tril().softmax(-1)
        z = torch.baddbmm(x, y, x, beta=0.5, alpha=2.0) + functional.log_softmax(x, 0)
        z = functional.glu(z, 1) + z[:, ::2] - x[:, None, 0].expand(-1, 3, -1)
        z += torch.addmm(z[:, 0], z[:, 1], z[:, 2].t() @ z[:, 2], beta=0)[:, None].detach()
        with torch.no_grad():
            scale = z.abs().mean()
        return functional.mse_loss(z, -z), z.flatten(1).cumsum(1) / scale


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
@pytest.mark.parametrize("ranks", [3, 4])
def test_other_operators(ranks: int) -> None:
    check_against_one_process(Many(), [batch()], {}, ranks)
    check_against_one_process(Many(), [batch()], {"input0": ((1, 1, ranks),)}, ranks)


@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_search_for_a_block(search: str) -> None:
    """Within a third of the parameters, no more bytes than by columns and rows on 4 ranks."""
    block, ranks = Block(), 4
    by_hand = check_against_one_process(block, [batch()], of_block(ranks), ranks)
    limit = sum(each.nbytes for each in block.parameters()) // 3
    found = check_against_one_process(
        block, [batch()], {}, ranks, search=search, memory_limit=limit
    )
    shapes = {name: tuple(each.shape) for name, each in block.named_parameters()}
    elements = [
        torch.empty(shapes[name], device="meta").nbytes // max(1, _parts(found, name))
        for name in shapes
    ]
    assert sum(elements) <= limit
    if search == "dynamic_programming":
        assert found.received_bytes <= by_hand.received_bytes


def _parts(result: Result, name: str) -> int:
    product = 1
    for cut in result.plan.layouts[name].cuts:
        product *= cut
    return product


def test_dropout_draws_equal_numbers_where_values_are_equal() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5))

    def run(strategy: Any, seed: int) -> Result:
        cuts = {"0": ((1, 1), (1, 1)), "1": strategy, "output0": ((1, 1),)}
        return run_sharded(model, [batch(8, WIDTH)], cuts, 4, lambda y, _: y.sum(), seed=seed)

    def kept(result: Result) -> Any:
        first = result.outputs[0][0]
        assert all(torch.equal(each[0], first) for each in result.outputs)
        return first != 0

    whole, again, other = (kept(run(((1, 1),), seed)) for seed in (3, 3, 4))
    assert torch.equal(whole, again)
    assert not torch.equal(whole, other)
    parts = kept(run(((1, 4),), 3)).chunk(4, 1)
    assert all(not torch.equal(parts[0], each) for each in parts[1:]), "parts draw other numbers"


@pytest.mark.parametrize(
    "seed", [pytest.param(n, marks=[] if n < 16 else [pytest.mark.soak]) for n in range(40)]
)
def test_random_strategies(seed: int) -> None:
    """Some operators of a model are cut in any way that fits; the others follow."""
    chooser = random.Random(seed)
    ranks = chooser.choice(RANKS)
    model = chooser.choice([Block, Llama])()
    x = batch()
    found = sharding.plan(model, x, mesh=Mesh((ranks,))).found
    assert found is not None
    operators = [each for each in found.operators if each.lengths]
    strategies = {}
    for operator in chooser.sample(operators, 5):
        cuts = chooser.choice(candidates(operator, ranks, chooser.random() < 0.5))
        strategies[operator.name] = operator.strategy(cuts)
    fully = chooser.random() < 0.7
    check_against_one_process(model, [x], strategies, ranks, fully_use_devices=fully)


def test_strategies_that_cannot_be_met() -> None:
    for strategies, words in (
        ({"up": columns(5)}, r"up: .*\(of Linear 'up'\); \(\(1, 1, 1\), \(1, 4\)\) would fit"),
        (
            {"down": ((1, 1, 4), (1, 1))},
            r"together by 4 and 1 .* \(\(1, 1, 4\), \(4, 1\)\) would fit",
        ),
        ({"up": ((1, 1), (1, 4))}, r"input 0 .* \(of Linear 'up'\); .* would fit"),
        ({"n1": ((1, 1, 4), (4,), (4,))}, r"n1 needs .* \(of LayerNorm 'n1'\); .* would fit"),
        ({"attention.view": ((1, 1, 16),)}, "would fit"),
    ):
        with pytest.raises(ValueError, match=words):
            sharding.plan(Block(), batch(), strategies, Mesh((4,)))


def test_values_that_a_part_reads() -> None:
    class Reads(nn.Module):
        def forward(self, x: Any) -> Any:
            return x * (x.relu().sum().item() + 1)

    with pytest.raises(ValueError, match="Reads reads some after sum"):
        sharding.plan(Reads(), batch(), mesh=Mesh((2,)))


def test_changes_in_place_that_a_view_would_see() -> None:
    class Writes(nn.Module):
        def forward(self, x: Any) -> Any:
            y = x * 2
            y[:, 0] = 0
            return y

    with pytest.raises(ValueError, match="changes a tensor in place of which a view is used"):
        sharding.plan(Writes(), batch(), mesh=Mesh((2,)))


def test_a_backward_that_a_user_has_written_is_refused() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Any) -> Any:
            return x.exp()

        @staticmethod
        def backward(context: Any, gradient: Any) -> Any:
            return 2 * gradient

    class Uses(nn.Module):
        def forward(self, x: Any) -> Any:
            return Doubled.apply(x)

    with pytest.raises(ValueError, match=r"Doubled has a backward\(\) of its own"):
        sharding.plan(Uses(), batch(), mesh=Mesh((2,)))
