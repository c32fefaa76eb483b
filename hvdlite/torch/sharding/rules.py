"""How each operator of torch may be cut, and how it then runs on the parts.

A rule tells along which axes the dimensions of an operator's tensors run (see
`hvdlite.common.layouts.operators`), and what runs instead of it on local tensors where that is not
the operator itself. An operator without a rule runs on whole inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from hvdlite.torch.sharding import pieces

Axes = tuple[int | None, ...]
# What runs on local tensors: a function, its arguments and its keyword arguments.
Run = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


class Site(Protocol):
    """Where this rank computes: how the axes of an operator are cut, and which parts it has."""

    cuts: Sequence[int]
    collectives: Any

    @property
    def coordinates(self) -> Sequence[int]:
        """Which part this rank has along each axis."""

    def members(self, axis: int) -> tuple[int, ...]:
        """Return the ranks that have the other parts along an axis."""


@dataclass(frozen=True)
class Rule:
    """The axes of each tensor among the arguments, and those of the result.

    `uncut`: axes that stay whole. `is_view`: the operator computes nothing. `complete`: axes that
    the result lacks, and over which the local operator sums among ranks itself. `turned`: inputs
    whose dimensions strategies list from the last one on. `local`: what runs instead on parts.
    """

    inputs: tuple[Axes, ...]
    output: Axes
    lengths: tuple[int, ...]
    uncut: frozenset[int] = frozenset()
    is_view: bool = False
    complete: frozenset[int] = frozenset()
    turned: frozenset[int] = frozenset()
    local: Callable[[Site, tuple[Any, ...], dict[str, Any]], Run] | None = None


Args = Sequence[Any]
Options = Mapping[str, Any]
Maker = Callable[[Any, Args, Options, torch.Tensor], Rule | None]


def rule_of(function: Any, args: Args, kwargs: Options, result: Any) -> Rule | None:
    """Return the rule of an operator that was called so, or None: then it needs whole inputs."""
    if not isinstance(result, torch.Tensor) or not tensors_of(args, kwargs):
        return None
    name = function._schema.name.partition("::")[2]
    rule = None
    if function._schema.name.startswith("aten::"):
        if name in _MAKERS:
            rule = _MAKERS[name](function, args, kwargs, result)
        elif torch.Tag.pointwise in function.tags or name in _LIKE_POINTWISE:
            rule = pointwise(function, args, kwargs, result)
    if rule is None:
        return None
    used = {axis for axes in rule.inputs for axis in axes}
    return replace(rule, uncut=rule.uncut | (set(range(len(rule.lengths))) - used))


def tensors_of(args: Args, kwargs: Options) -> list[torch.Tensor]:
    """Return the tensors among arguments, in the order in which strategies number them."""
    leaves = tree_leaves((tuple(args), dict(kwargs)))
    return [each for each in leaves if isinstance(each, torch.Tensor)]


_LIKE_POINTWISE = {
    "dropout", "clone", "contiguous", "detach", "alias", "to", "_to_copy", "lift_fresh", "float",
    "type_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "relu", "gelu", "silu", "softplus", "hardtanh", "relu6", "selu", "elu", "celu", "leaky_relu",
    "mish", "hardswish", "logsigmoid", "log_sigmoid", "masked_fill", "where", "square", "rsub",
}  # fmt: skip


def pointwise(
    function: Any, args: Args, kwargs: Options, result: torch.Tensor, uncut: Sequence[int] = ()
) -> Rule | None:
    """Return the rule of an operator whose inputs are broadcast to the shape of its result."""
    shapes = [tuple(each.shape) for each in tensors_of(args, kwargs)]
    full = tuple(result.shape)
    axes = [broadcast_axes(shape, full) for shape in shapes]
    if any(each is None for each in axes):
        return None
    whole = frozenset(axis % len(full) for axis in uncut) if full else frozenset()
    inputs = tuple(each for each in axes if each is not None)
    return Rule(inputs, tuple(range(len(full))), full, whole)


def broadcast_axes(shape: Sequence[int], full: Sequence[int]) -> Axes | None:
    """Return the axes of a tensor that is broadcast to a shape; None if it cannot be."""
    first = len(full) - len(shape)
    if first < 0 or any(n not in (1, full[first + i]) for i, n in enumerate(shape)):
        return None
    return tuple(first + i if n == full[first + i] else None for i, n in enumerate(shape))


def _along(argument: str, default: Any = None) -> Maker:
    """Return the rule of a pointwise operator that needs the dimensions of an argument whole."""

    def make(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
        found = argument_of(function, args, kwargs, argument)
        dims = default if found is None else found
        if dims is None:
            return None
        uncut = (dims,) if isinstance(dims, int) else tuple(dims)
        return pointwise(function, args, kwargs, result, uncut)

    return make


def _last_two(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    return pointwise(function, args, kwargs, result, (-2, -1))


def argument_of(function: Any, args: Args, kwargs: Options, name: str) -> Any:
    """Return an argument by its name in the operator's schema, or its default."""
    for index, argument in enumerate(function._schema.arguments):
        if argument.name == name:
            if index < len(args):
                return args[index]
            return kwargs.get(name, argument.default_value)
    return None


def _normalized(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    return pointwise(function, args, kwargs, result, range(-len(args[1]), 0))


def _group_norm(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    groups, shape = int(args[1]), tuple(result.shape)
    tensors = tensors_of(args, kwargs)
    inputs: tuple[Axes, ...] = ((0, 1, *[None] * (len(shape) - 2)), *[(1,)] * (len(tensors) - 1))

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        return function, (given[0], groups // site.cuts[1], *given[2:]), options

    return Rule(inputs, inputs[0], (shape[0], groups), local=local)


def matmul(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a product of two tensors with at least two dimensions each."""
    left, right = (tuple(each.shape) for each in tensors_of(args, kwargs))
    if len(left) < 2 or len(right) < 2:
        return None
    full = tuple(result.shape)
    batch, last = len(full) - 2, len(full)
    before = broadcast_axes(left[:-2], full[:-2]), broadcast_axes(right[:-2], full[:-2])
    assert before[0] is not None and before[1] is not None
    return Rule(
        ((*before[0], batch, last - 1), (*before[1], last - 1, last)),
        (*range(batch), batch, last),
        (*full[:-1], left[-1], full[-1]),
    )


def linear(rows: int, inputs: Sequence[int], weight: Sequence[int]) -> Rule:
    """Return the rule of X [.., in] x W [out, in], whose strategies list W as [in, out]."""
    return Rule(
        (tuple(range(rows + 1)), (rows + 1, rows)),
        (*range(rows), rows + 1),
        (*inputs, weight[0]),
        turned=frozenset([1]),
    )


def _einsum(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    spec, tensors = args[0].replace(" ", ""), args[1]
    left, arrow, right = spec.partition("->")
    labels = left.split(",")
    if "." in spec or any(len(set(label)) < len(label) for label in labels):
        return None
    if not arrow:
        right = "".join(sorted(each for each in set(left) - {","} if left.count(each) == 1))
    letters = [*right, *sorted(set(left) - set(right) - {","})]
    lengths = dict.fromkeys(letters, 1)
    for label, tensor in zip(labels, tensors, strict=True):
        for letter, length in zip(label, tensor.shape, strict=True):
            lengths[letter] = max(lengths[letter], length)
    inputs = tuple(
        tuple(
            letters.index(letter) if length == lengths[letter] else None
            for letter, length in zip(label, tensor.shape, strict=True)
        )
        for label, tensor in zip(labels, tensors, strict=True)
    )
    return Rule(inputs, tuple(range(len(right))), tuple(lengths[each] for each in letters))


def _strided(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a view by strides, found with a tensor whose strides all differ."""
    shape = tuple(args[0].shape)
    strides = [math.prod(n + 1 for n in shape[i + 1 :]) for i in range(len(shape))]
    probe = torch.empty_strided(shape, strides, device="meta")
    others = [each.to("meta") if isinstance(each, torch.Tensor) else each for each in args[1:]]
    found = function(probe, *others, **kwargs)
    axes: list[int | None] = [None] * len(shape)
    output: list[int | None] = [None] * found.ndim
    lengths: list[int] = []
    for dim, (length, stride) in enumerate(zip(found.shape, found.stride(), strict=True)):
        if length > 1 and stride in strides and shape[strides.index(stride)] == length:
            axes[strides.index(stride)] = output[dim] = len(lengths)
            lengths.append(length)
    return Rule(
        (tuple(axes), *[(None,) * each.ndim for each in tensors_of(args[1:], kwargs)]),
        tuple(output),
        tuple(lengths),
        is_view=True,
    )


def _expand(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    rule = _strided(torch.ops.aten.expand.default, (args[0], result.shape), {}, result)
    return _by_shape(rule, torch.ops.aten.expand.default, result, len(tensors_of(args, kwargs)))


def _slice(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a slice, which needs its dimension whole unless it takes all of it."""
    rule = _strided(function, args, kwargs, result)
    if rule is not None and tuple(args[0].shape) == tuple(result.shape):

        def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
            return torch.ops.aten.alias.default, (given[0],), {}

        return replace(rule, local=local)
    return rule


def _by_shape(rule: Rule | None, target: Any, result: torch.Tensor, tensors: int) -> Rule | None:
    """Return a rule whose operator is told the shape of its local result."""
    if rule is None:
        return None
    shape, output = tuple(result.shape), rule.output

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        sizes = [
            n if axis is None else n // site.cuts[axis]
            for n, axis in zip(shape, output, strict=True)
        ]
        return target, (given[0], sizes), {}

    if tensors > 1:  # The others give their shapes alone.
        return None
    return replace(rule, local=local)


def _reshape(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a view by another shape: the first dimensions of parts are cut alike."""
    if function._overloadname == "dtype":
        return None
    before, after = tuple(args[0].shape), tuple(result.shape)
    inputs: list[int | None] = [None] * len(before)
    output: list[int | None] = [None] * len(after)
    lengths: list[int] = []
    for first, second in _same_products(before, after):
        long = [dim for dim in first if before[dim] > 1], [dim for dim in second if after[dim] > 1]
        if all(long):
            inputs[long[0][0]] = output[long[1][0]] = len(lengths)
            lengths.append(math.gcd(before[long[0][0]], after[long[1][0]]))
    rule = Rule((tuple(inputs),), tuple(output), tuple(lengths), is_view=True)
    target = torch.ops.aten.reshape.default
    return _by_shape(rule, target, result, len(tensors_of(args, kwargs)))


def _same_products(
    before: Sequence[int], after: Sequence[int]
) -> list[tuple[list[int], list[int]]]:
    """Return the runs of dimensions of two shapes that have as many elements."""
    if 0 in before:
        return []
    found = []
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = [i], [j]
        one, other = before[i], after[j]
        while one != other:
            if one < other:
                i += 1
                one *= before[i]
                first.append(i)
            else:
                j += 1
                other *= after[j]
                second.append(j)
        found.append((first, second))
        i, j = i + 1, j + 1
    return found


def _joined(is_new: bool) -> Maker:
    """Return the rule of `cat`, or of `stack` where the dimension is new."""

    def make(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
        dim = int(argument_of(function, args, kwargs, "dim") or 0) % result.ndim
        if any(each.ndim != result.ndim - is_new for each in args[0]):
            return None  # cat() takes an empty tensor of one dimension beside others.
        output: list[int | None] = list(range(result.ndim))
        output[dim] = None
        one = [axis for axis in output if axis is not None] if is_new else output
        return Rule((tuple(one),) * len(args[0]), tuple(output), tuple(result.shape))

    return make


def _reduction(summed: bool) -> Maker:
    """Return the rule of a reduction: of a sum or mean, whose parts add up, or of another one."""

    def make(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
        shape = tuple(args[0].shape)
        given = argument_of(function, args, kwargs, "dim")
        if given is None or given == []:
            given = range(len(shape))
        dims = {dim % len(shape) for dim in ([given] if isinstance(given, int) else given)}
        keeps = result.ndim == len(shape)
        output: list[int | None] = []
        for dim in range(len(shape)):
            if dim not in dims:
                output.append(dim)
            elif keeps:
                output.append(None)
        axes = tuple(dim if summed or dim not in dims else None for dim in range(len(shape)))
        is_mean = function._schema.name == "aten::mean"

        def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
            parts = math.prod(site.cuts[dim] for dim in dims) if is_mean else 1
            return pieces.divided, (function, parts, *given), options

        return Rule((axes,), tuple(output), shape, local=local if is_mean else None)

    return make


def _mean_of_pairs(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of a loss that compares two tensors element by element."""
    shape = tuple(args[0].shape)
    reduction = argument_of(function, args, kwargs, "reduction")
    if tuple(args[1].shape) != shape:
        return None
    axes = tuple(range(len(shape)))

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        parts = math.prod(site.cuts) if reduction == 1 else 1
        return pieces.divided, (function, parts, *given), options

    return Rule((axes, axes), axes if reduction == 0 else (), shape, local=local)


def _embedding(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    (rows, width), words = args[0].shape, tuple(args[1].shape)
    padding = argument_of(function, args, kwargs, "padding_idx")
    if argument_of(function, args, kwargs, "scale_grad_by_freq") or argument_of(
        function, args, kwargs, "sparse"
    ):
        return None
    at = len(words)

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        if site.cuts[at] == 1:
            return function, given, options
        first = rows // site.cuts[at] * site.coordinates[at]
        return pieces.embedding_of_rows, (given[0], given[1], first, int(padding)), {}

    axes = tuple(range(at))
    return Rule(((at, at + 1), axes), (*axes, at + 1), (*words, rows, width), local=local)


def _cross_entropy(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    logits, target = args[0], args[1]
    reduction = argument_of(function, args, kwargs, "reduction")
    if (
        argument_of(function, args, kwargs, "weight") is not None
        or argument_of(function, args, kwargs, "label_smoothing")
        or logits.ndim != 2
        or target.ndim != 1
    ):
        return None
    ignored = argument_of(function, args, kwargs, "ignore_index")

    def local(site: Site, given: tuple[Any, ...], options: dict[str, Any]) -> Run:
        cut = pieces.Classes(
            logits.shape[1] // site.cuts[1] * site.coordinates[1],
            site.members(1), site.members(0), site.collectives,
        )  # fmt: skip
        return pieces.cross_entropy, (given[0], given[1], int(reduction), int(ignored), cut), {}

    output: Axes = (0,) if reduction == 0 else ()
    axes = frozenset([1])
    return Rule(((0, 1), (0,)), output, tuple(logits.shape), complete=axes, local=local)


def _attention(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    query, key, value = (tuple(each.shape) for each in args[:3])
    mask = argument_of(function, args, kwargs, "attn_mask")
    causal = argument_of(function, args, kwargs, "is_causal")
    full = tuple(result.shape)
    batch = len(full) - 2
    lengths = list(full[:-2])
    inputs: list[Axes] = []
    for shape in (query, key, value):
        axes: list[int | None] = []
        for dim, length in enumerate(shape[:-2]):
            if length == full[dim]:
                axes.append(dim)
            elif dim == batch - 1 and length > 1 and full[dim] % length == 0:
                axes.append(dim)  # Some heads of queries share one of keys and values.
                lengths[dim] = math.gcd(lengths[dim], length)
            else:
                axes.append(None)
        inputs.append((*axes, batch if len(inputs) == 0 else None, None))
    output: Axes = (*range(batch), batch, None)
    if mask is not None:
        of_mask = broadcast_axes(tuple(mask.shape), (*full[:-1], key[-2]))
        if of_mask is None:
            return None
        inputs.append((*of_mask[:-1], None))
    uncut = frozenset([batch]) if causal else frozenset()
    return Rule(tuple(inputs), output, (*lengths, full[-2]), uncut)


def _repeat_interleave(
    function: Any, args: Args, kwargs: Options, result: torch.Tensor
) -> Rule | None:
    dim = argument_of(function, args, kwargs, "dim")
    if function._overloadname != "self_int" or dim is None:
        return None
    axes = tuple(range(result.ndim))
    return Rule((axes,), axes, tuple(args[0].shape))


def _chosen(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    """Return the rule of `index_select`, which needs one dimension whole."""
    dim = args[1] % args[0].ndim
    axes = tuple(None if each == dim else each for each in range(args[0].ndim))
    return Rule((axes, (None,)), axes, tuple(args[0].shape))


def _half(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    dim = int(argument_of(function, args, kwargs, "dim")) % result.ndim
    axes = tuple(None if each == dim else each for each in range(result.ndim))
    return Rule((axes,), axes, tuple(result.shape))


def _complex_view(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    dims = min(args[0].ndim, result.ndim)
    axes = tuple(range(dims))
    shape = tuple(args[0].shape)[:dims]
    source, target = ((*axes, None)[: each.ndim] for each in (args[0], result))
    return Rule((source,), target, shape, is_view=True)


def _prelu(function: Any, args: Args, kwargs: Options, result: torch.Tensor) -> Rule | None:
    axes = tuple(range(result.ndim))
    one: Axes = (None,) if args[1].numel() == 1 else (1,)
    return Rule((axes, one if args[1].ndim else ()), axes, tuple(result.shape))


_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(["softmax", "_softmax", "log_softmax", "_log_softmax"], _along("dim")),
    **dict.fromkeys(["cumsum", "cumprod", "logcumsumexp"], _along("dim")),
    **dict.fromkeys(["flip", "roll"], _along("dims")),
    **dict.fromkeys(["tril", "triu"], _last_two),
    **dict.fromkeys(["layer_norm", "rms_norm"], _normalized),
    "group_norm": _group_norm,
    **dict.fromkeys(["matmul", "mm", "bmm"], matmul),
    "einsum": _einsum,
    **dict.fromkeys(
        ["t", "numpy_T", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis",
         "mT", "matrix_H", "mH", "adjoint", "select", "unsqueeze"], _strided,
    ),
    **dict.fromkeys(["slice", "narrow"], _slice),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], _expand),
    **dict.fromkeys(
        ["view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as",
         "squeeze", "ravel"], _reshape,
    ),
    "cat": _joined(False), "concat": _joined(False), "concatenate": _joined(False),
    "stack": _joined(True),
    **dict.fromkeys(["sum", "mean"], _reduction(True)),
    **dict.fromkeys(
        ["amax", "amin", "var", "std", "logsumexp", "any", "all", "argmax", "argmin"],
        _reduction(False),
    ),
    **dict.fromkeys(["mse_loss", "l1_loss"], _mean_of_pairs),
    "embedding": _embedding,
    "cross_entropy_loss": _cross_entropy,
    "scaled_dot_product_attention": _attention,
    "repeat_interleave": _repeat_interleave,
    "index_select": _chosen,
    "glu": _half,
    **dict.fromkeys(["view_as_complex", "view_as_real"], _complex_view),
    "prelu": _prelu,
}  # fmt: skip
