"""Which operator of torch has which rule."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from hvdlite.torch.sharding.rules import elementwise, images, layers, products, views
from hvdlite.torch.sharding.rules.rule import Args, Maker, Options, Rule, tensors_of


def rule_of(function: Any, args: Args, kwargs: Options, result: Any) -> Rule | None:
    """Return the rule of an operator that was called so, or None: then it needs whole inputs."""
    name = function._schema.name.partition("::")[2]
    if not isinstance(result, torch.Tensor) and name not in _BESIDE:
        return None
    if not tensors_of(args, kwargs):
        return None
    rule = None
    if function is torch.ops.hvdlite.rows_apart.default:
        rule = views.rows_apart(function, args, kwargs, result)
    elif function._schema.name.startswith("aten::"):
        maker = _MAKERS.get(name) or _MAKERS.get(name.removesuffix("_"))  # in place
        if maker is not None:
            rule = maker(function, args, kwargs, result)
        elif torch.Tag.pointwise in function.tags or name in _LIKE_POINTWISE:
            rule = elementwise.pointwise(function, args, kwargs, result)
    if rule is None:
        return None
    used = {axis for axes in rule.inputs for axis in axes}
    return replace(rule, uncut=rule.uncut | (set(range(len(rule.lengths))) - used))


_LIKE_POINTWISE = {
    "dropout", "clone", "contiguous", "detach", "alias", "to", "_to_copy", "lift_fresh", "float",
    "type_as", "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "relu", "gelu", "silu", "softplus", "hardtanh", "relu6", "selu", "elu", "celu", "leaky_relu",
    "mish", "hardswish", "logsigmoid", "log_sigmoid", "masked_fill", "where", "square", "rsub",
}  # fmt: skip
# They return a tensor, or a tuple of some.
_BESIDE = (
    "sort", "argsort", "topk", "kthvalue", "mode", "max", "min", "median", "nanmedian", "cummax",
    "cummin", "aminmax", "var_mean", "std_mean", "nansum", "prod", "count_nonzero",
)  # fmt: skip
_MAKERS: dict[str, Maker] = {
    **dict.fromkeys(_BESIDE, elementwise.beside),
    **dict.fromkeys(
        ["softmax", "_softmax", "log_softmax", "_log_softmax", "cumsum", "cumprod",
         "logcumsumexp"], elementwise.along("dim"),
    ),
    **dict.fromkeys(["flip", "roll"], elementwise.along("dims")),
    **dict.fromkeys(["tril", "triu"], partial(elementwise.pointwise, uncut=(-2, -1))),
    **dict.fromkeys(["layer_norm", "rms_norm"], layers.normalized),
    "group_norm": layers.group_norm,
    **dict.fromkeys(["matmul", "mm", "bmm"], products.matmul),
    "einsum": products.einsum,
    **dict.fromkeys(
        ["t", "numpy_T", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis",
         "mT", "matrix_H", "mH", "adjoint", "select", "unsqueeze"], views.strided,
    ),
    **dict.fromkeys(["slice", "narrow"], views.sliced),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], views.expand),
    **dict.fromkeys(
        ["view", "reshape", "_unsafe_view", "flatten", "unflatten", "view_as", "reshape_as",
         "squeeze", "ravel"], views.reshape,
    ),
    "cat": views.joined(False), "concat": views.joined(False), "concatenate": views.joined(False),
    "stack": views.joined(True),
    **dict.fromkeys(["sum", "mean"], elementwise.reduction(True)),
    **dict.fromkeys(
        ["amax", "amin", "var", "std", "logsumexp", "any", "all", "argmax", "argmin"],
        elementwise.reduction(False),
    ),
    **dict.fromkeys(["mse_loss", "l1_loss"], elementwise.mean_of_pairs),
    "embedding": layers.embedding,
    "cross_entropy_loss": layers.cross_entropy,
    "scaled_dot_product_attention": layers.attention,
    "repeat_interleave": views.repeat_interleave,
    "index_select": views.chosen, "index": views.indexed, "gather": views.gathered,
    "scatter": views.scattered, "index_copy": views.copied,
    "glu": elementwise.half,
    **dict.fromkeys(["view_as_complex", "view_as_real"], views.complex_view),
    "prelu": elementwise.prelu,
    **dict.fromkeys(
        ["max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
         "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d",
         "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d",
         "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"], images.pooling,
    ),
    **dict.fromkeys(["pad", "constant_pad_nd"], images.padding),
    "batch_norm": images.batch_norm,
    "instance_norm": images.instance_norm,
}  # fmt: skip
