"""Losses, indices and torch's attention on ranks as threads equal one process, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.torch.sharded_ranks import check_against_one_process, run_sharded

RANKS = [2, 3, 4]
BATCH, WORDS, WIDTH, HEADS = 12, 6, 48, 12

pytestmark = pytest.mark.usefixtures("float64")


class Losses(nn.Module):
    """Cross entropies by all reductions, weighted and smoothed."""

    def __init__(self, classes: int, weighted: bool, smoothing: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.rand(classes) + 0.5 if weighted else None)
        self.smoothing = smoothing

    def forward(self, logits: Any, target: Any) -> Any:
        return tuple(
            functional.cross_entropy(
                logits, target, self.weight, reduction=each, ignore_index=1,
                label_smoothing=self.smoothing,
            )
            for each in ("mean", "sum", "none")
        )  # fmt: skip


@pytest.mark.parametrize("cuts", [(2, 1), (1, 2)])
def test_a_target_that_is_no_class_is_refused_as_torch_does(cuts: tuple[int, int]) -> None:
    """No rank has the class, as if all ranks thought that another one had it."""
    model, strategies = Losses(WIDTH, False, 0.0), {"cross_entropy_loss": (cuts, cuts[:1])}
    for wrong in (WIDTH, 50, -1):
        batch = [torch.randn(BATCH, WIDTH), torch.full((BATCH,), wrong)]
        with pytest.raises(IndexError, match=f"^Target {wrong} is out of bounds"):
            model(*batch)
        with pytest.raises(IndexError, match=f"^Target {wrong} is out of bounds"):
            run_sharded(model, batch, strategies, 2, lambda output, _: output.sum())


@pytest.mark.parametrize("cuts", [(2, 1), (1, 2), (1, 1)])
def test_a_word_that_no_rank_has_is_refused(cuts: tuple[int, int]) -> None:
    table = nn.Embedding(12, 4)
    for wrong in (12, 999, -1):
        batch = [torch.full((2, 3), wrong)]
        with pytest.raises(IndexError):
            table(*batch)
        with pytest.raises(IndexError, match=f"word {wrong} is none|index out of range"):
            run_sharded(table, batch, {"": (cuts, (1, 1))}, 2, lambda output, _: output.sum())


@pytest.mark.parametrize(
    ("ranks", "weighted", "smoothing"),
    [(3, False, 0.0), (4, False, 0.0), (3, False, 0.2), (4, True, 0.0), (3, True, 0.2)],
)
def test_cross_entropy(ranks: int, weighted: bool, smoothing: float) -> None:
    model = Losses(WIDTH, weighted, smoothing)
    logits, target = 9 * torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))
    target[::5] = 1
    weights: Any = ((1,),) if weighted else ()
    for cut in (1, ranks):
        of_weights = ((cut,),) if weighted else weights
        samples = ranks // cut
        cuts = {
            f"cross_entropy_loss{end}": ((samples, cut), (samples,), *of_weights)
            for end in ("", "_1", "_2")
        }
        found = check_against_one_process(model, [logits, target], cuts, ranks)
        if cut > 1:
            most = (4 if weighted else 3) * logits.nbytes // ranks
            assert found.received_bytes < most, "only the batch is cut anew"


def test_cross_entropy_of_each_pixel() -> None:
    ranks = 4
    logits, target = torch.randn(BATCH, 24, 12, 2), torch.randint(24, (BATCH, 12, 2))
    for cuts in ((ranks, 1, 1, 1), (1, ranks, 1, 1), (1, 1, ranks, 1)):
        of_target = (cuts[0], *cuts[2:])
        given: Any = {
            f"cross_entropy_loss{end}": (cuts, of_target, (cuts[1],)) for end in ("", "_1", "_2")
        }
        check_against_one_process(Losses(24, True, 0.1), [logits, target], given, ranks)


class Indices(nn.Module):
    """Elements at places that are constant, given, or found, in one dimension or several."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(WIDTH, 4, WORDS))
        self.register_buffer("order", torch.randperm(WIDTH))

    def forward(self, x: Any, places: Any) -> Any:
        y = x[..., self.order] + x[:, torch.tensor([[2], [0]]), :][:, 0]
        y = y * self.table[places % WIDTH, :, places % WORDS].sum(2)[..., None]
        z = self.table[places % WIDTH][:, 0].mean((1, 2))
        picked = x.gather(2, places[..., None] % WIDTH)
        return y + picked, z, x[torch.arange(BATCH), places[:, 0] % WORDS]


@pytest.mark.parametrize("ranks", [3, 4])
def test_indices(ranks: int) -> None:
    inputs = [torch.randn(BATCH, WORDS, WIDTH), torch.randint(999, (BATCH, WORDS))]
    for cuts in ({}, {"input0": ((1, 1, ranks),)}, {"input1": ((ranks, 1),)}):
        check_against_one_process(Indices(), inputs, cuts, ranks)


class SelfAttention(nn.Module):
    """torch's attention of a sequence on itself, or on another one."""

    def __init__(self, mask: str = "", weights: bool = False, **options: Any) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, **options)
        self.mask, self.weights = mask, weights
        self.other = None if "kdim" not in options else nn.Linear(WIDTH, options["kdim"])

    def forward(self, x: Any) -> Any:
        words = x.shape[1] if self.inner.batch_first else x.shape[0]
        masks: dict[str, Any] = {}
        if self.mask:
            masks["attn_mask"] = torch.ones(words, words, dtype=torch.bool).triu(1)
        if self.mask == "causal":
            masks["is_causal"] = True
        if self.mask == "padding":
            batch = x.shape[0] if self.inner.batch_first else x.shape[1]
            lengths = torch.arange(batch) % 3 + 2
            masks["key_padding_mask"] = torch.arange(words) >= lengths[:, None]
            masks["attn_mask"] = torch.zeros(words, words, dtype=torch.bool)
        y = x if self.other is None else self.other(x)
        found, weights = self.inner(x, y, y, need_weights=self.weights, **masks)
        return (found, weights) if self.weights else found


def by_heads(n: int) -> Any:
    return {"inner.scaled_dot_product_attention": ((1, n, 1, 1),) * 3}


@pytest.mark.parametrize("ranks", RANKS)  # There are three parts.
def test_packed_weights_are_cut_by_heads(ranks: int) -> None:
    model = SelfAttention(batch_first=True)
    x = torch.randn(BATCH, WORDS, WIDTH)
    found = check_against_one_process(model, [x], by_heads(ranks), ranks)
    layouts = found.plan.layouts
    assert layouts["inner.in_proj_weight"].cuts == (ranks, 1)
    assert layouts["inner.in_proj_bias"].cuts == (ranks,)
    assert layouts["inner.out_proj.weight"].cuts == (1, ranks)
    exchanged = [each for name, each in found.plan.items() if "rows_apart" in name]
    weight = model.inner.in_proj_weight.nbytes
    assert max(each.bytes for each in exchanged) == weight // ranks * (ranks - 1) // ranks


@pytest.mark.parametrize(
    ("mask", "weights"),
    [("", False), ("causal", False), ("padding", False), ("causal", True), ("padding", True)],
)
def test_attention_of_torch(mask: str, weights: bool) -> None:
    ranks = 4
    model = SelfAttention(mask, weights, batch_first=True)
    x = torch.randn(BATCH, WORDS, WIDTH)
    check_against_one_process(model, [x], {}, ranks)
    for cuts in ({"inner.linear": ((1, 1, 1), (1, ranks))}, {"input0": ((1, 1, ranks),)}):
        check_against_one_process(model, [x], cuts, ranks)


def test_attention_on_another_sequence() -> None:
    ranks = 3
    x = torch.randn(BATCH, WORDS, WIDTH)
    for options in ({"kdim": 24, "vdim": 24}, {"kdim": 24, "vdim": 24, "bias": False}):
        found = check_against_one_process(SelfAttention(**options), [x], by_heads(ranks), ranks)
        assert found.plan.layouts["inner.k_proj_weight"].cuts == (ranks, 1)


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}])
def test_attention_that_few_models_have(options: Any) -> None:
    x = torch.randn(BATCH, WORDS, WIDTH)
    check_against_one_process(SelfAttention("mask", True, **options), [x], {}, 2)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("training", [False, True])
def test_an_encoder_layer_is_cut_by_heads(norm_first: bool, training: bool) -> None:
    ranks = 3 if norm_first else 4
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 96, 0.0, batch_first=True, norm_first=norm_first
    ).train(training)
    x = torch.randn(BATCH, WORDS, WIDTH)
    cuts: Any = {"linear1": ((1, 1, 1), (1, ranks)), "linear2": ((1, 1, ranks), (ranks, 1))}
    check_against_one_process(layer, [x], cuts, ranks)
    cuts["self_attn.scaled_dot_product_attention"] = ((1, ranks, 1, 1),) * 3
    found = check_against_one_process(layer, [x], cuts, ranks)
    whole = sum(each.nbytes for each in layer.parameters() if each.ndim > 1)
    held = sum(
        each.nbytes // max(found.plan.layouts[name].cuts)
        for name, each in layer.named_parameters()
        if each.ndim > 1
    )
    assert held == whole // ranks, "no rank has more of the weights than its part"


class Cache(nn.Module):
    """Attention to keys and values that are kept in buffers, at places that each sample has."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(BATCH, HEADS, WORDS, WIDTH // HEADS))

    def forward(self, x: Any, places: Any) -> Any:
        query, key, value = (
            each(x).view(BATCH, -1, HEADS, WIDTH // HEADS).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        )
        there = places[:, None, :, None].expand(key.shape)
        self.keys.scatter_(2, there, key.detach())
        self.values.index_copy_(2, torch.tensor([3]), value.detach()[:, :, :1])
        before = torch.arange(WORDS) <= places[:, None, :, None]
        found = functional.scaled_dot_product_attention(query, self.keys, self.values, before)
        return found.transpose(1, 2).reshape(x.shape), self.keys.scatter(2, there, 1.0).sum(2)


@pytest.mark.parametrize("ranks", [3, 4])
def test_keys_and_values_are_kept_by_heads(ranks: int) -> None:
    inputs = [torch.randn(BATCH, 2, WIDTH), torch.randint(WORDS, (BATCH, 2))]
    inputs[1][:, 1] = (inputs[1][:, 0] + 1) % WORDS
    columns = ((1, 1, 1), (1, ranks))
    cuts: Any = {"query": columns, "key": columns, "value": columns}
    found = check_against_one_process(Cache(), inputs, cuts, ranks)
    for name in ("keys", "values"):
        assert found.plan.layouts[name].cuts == (1, ranks, 1, 1)
        assert name in found.buffers
    check_against_one_process(Cache(), inputs, {}, ranks)


class Words(nn.Module):
    """Attention of a sequence on itself, with a mask that is learned, fixed, or none."""

    def __init__(self, mask: str) -> None:
        super().__init__()
        self.mask = mask
        self.bias = nn.Parameter(torch.randn(HEADS, 1, WORDS * 2))

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        mask = None
        if self.mask == "learned":
            mask = self.bias
        elif self.mask == "bool":  # The first words see nothing at all.
            mask = (torch.arange(WORDS * 2) % 5 != 1).expand(WORDS * 2, -1).tril(-3)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.mask == "causal", scale=0.3
        )


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("mask", ["none", "causal", "learned", "bool"])
def test_words_that_are_cut_see_each_other_by_a_ring(ranks: int, mask: str) -> None:
    shape = (BATCH, HEADS, WORDS * 2, 4)
    inputs = [torch.randn(shape) for _ in range(3)]
    of_mask: Any = {"learned": ((1, 1, 1),), "bool": ((ranks, 1),)}.get(mask, ())
    cuts: Any = {"scaled_dot_product_attention": ((1, 1, ranks, 1),) * 3 + of_mask}
    found = check_against_one_process(Words(mask), inputs, cuts, ranks)
    sizes = inputs[0].nbytes
    attention = found.plan["scaled_dot_product_attention"]
    assert attention.bytes == 2 * (ranks - 1) * sizes // ranks
    # Four tensors are cut anew, forward and back; two go around, four back, and two come home.
    around = (2 + 4) * (ranks - 1) * sizes // ranks + 2 * sizes // ranks
    of_bias = 2 * HEADS * WORDS * 2 * 8
    assert found.received_bytes <= 8 * (ranks - 1) * sizes // ranks**2 + around + of_bias


@pytest.mark.parametrize("ranks", [2, 4])
def test_words_and_heads_are_cut_at_once(ranks: int) -> None:
    inputs = [torch.randn(BATCH, HEADS, WORDS * 2, 4) for _ in range(3)]
    cuts: Any = {"scaled_dot_product_attention": ((1, 2, ranks // 2, 1),) * 3}
    check_against_one_process(Words("causal"), inputs, cuts, ranks)
    check_against_one_process(Words("causal"), [each.float() for each in inputs], cuts, ranks, 1e-5)


def test_a_transformer_of_which_the_words_are_cut() -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 96, 0.0, batch_first=True)
    cuts: Any = {
        "input0": ((1, 3, 1),),
        "self_attn.scaled_dot_product_attention": ((1, 1, 3, 1),) * 3,
    }
    found = check_against_one_process(layer, [torch.randn(BATCH, WORDS, WIDTH)], cuts, 3)
    assert found.plan["linear1"].strategy == ((1, 3, 1), (1, 1)), "all of the block follows"


class Sorted(nn.Module):
    """What looks along one dimension, with one result and with two."""

    def forward(self, x: Any) -> Any:
        largest, at = x.max(1)
        values, places = x.topk(2, 1)
        sums, order = x.cumsum(1), x.sort(1)
        found = values.sum(1) + places.sum(1) + largest * at + x.min(1)[0] + x.median(1)[0]
        found = found + x.argmax(1) * x.kthvalue(2, 1)[0] + torch.var_mean(x, 1)[1]
        return found, sums + order[0] * order[1], torch.max(x, x.tanh()), x.cummax(1)[0]


def test_what_looks_along_a_dimension_is_cut_along_others() -> None:
    """None of it runs on whole inputs, which would be a warning, and so an error here."""
    ranks = 4
    x = torch.randn(BATCH, WORDS, WIDTH)
    found = check_against_one_process(Sorted(), [x], {}, ranks)
    assert found.received_bytes == 0, "the batch is cut, and stays so"
    found = check_against_one_process(Sorted(), [x], {"input0": ((1, 1, ranks),)}, ranks)
    for name in ("max", "topk", "cumsum", "sort", "argmax"):
        assert found.plan[name].strategy == ((1, 1, ranks),), name
        assert found.plan[name].bytes == 0


class InPlace(nn.Module):
    """Changes a tensor by others of larger dtypes, and keeps its own."""

    def forward(self, x: Any, y: Any) -> Any:
        z = x.float() * 3
        z += y
        assert z.dtype == torch.float32
        z.mul_(y).clamp_(min=y.double())
        z.masked_fill_(z > 9, 1)
        return z.double() + z.gt_(y)


def test_an_operator_in_place_keeps_the_dtype() -> None:
    ranks = 4
    inputs = [torch.randn(BATCH, WIDTH), torch.randn(BATCH, WIDTH)]
    for cuts in ({}, {"input0": ((1, ranks),)}):
        found = check_against_one_process(InPlace(), inputs, cuts, ranks, tolerance=1e-6)
        together = torch.cat([each[0] for each in found.outputs])
        assert torch.equal(together, InPlace()(*inputs)), "rounded to float32 each time"


class Rolled(nn.Module):
    """All elements, and those of a dimension, in a circle."""

    def forward(self, x: Any) -> Any:
        return torch.roll(x, 3) + torch.roll(x, 1, 1)


@pytest.mark.filterwarnings("ignore:.*runs on whole inputs")
def test_a_roll_of_all_elements() -> None:
    check_against_one_process(Rolled(), [torch.randn(BATCH, WORDS)], {}, 3)


class Numbered(nn.Module):
    """Returns numbers that are made of no input beside what is made of one."""

    def forward(self, x: Any) -> Any:
        return x * 2, torch.arange(BATCH) * 2


def test_what_is_made_of_no_input_is_whole_on_each_rank() -> None:
    x = torch.randn(BATCH, WORDS)
    result = run_sharded(Numbered(), [x], {}, 3, lambda output, _rank: output.sum())
    for _, numbers in result.outputs:
        assert numbers.tolist() == [2 * each for each in range(BATCH)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_loss_has_the_dtype_that_torch_gives_it(reduction: str, autocast: bool) -> None:
    class Loss(nn.Module):
        def forward(self, x: Any) -> Any:
            found = x.new_zeros(len(x), dtype=torch.int64)
            with torch.autocast("cpu", enabled=autocast):
                return functional.cross_entropy(x, found, reduction=reduction)

    logits = torch.randn(4, 6, dtype=torch.bfloat16)
    for cuts in ((2, 1), (1, 2)):
        dtypes = []

        def loss(output: Any, rank: int, dtypes: Any = dtypes) -> Any:
            dtypes.append(output.dtype)
            return output.sum()

        given = {"cross_entropy_loss": (cuts, cuts[:1])}
        run_sharded(Loss(), [logits.requires_grad_()], given, 2, loss)
        assert dtypes == [Loss()(logits).dtype] * 2
