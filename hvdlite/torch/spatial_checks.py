"""What `SpatialConv2d.wrap` refuses: modules that compute something else on a slice of an image.

torch's own modules pass if they are known to be right on slices. Modules of the user pass, as only
their `forward` tells what they do; what is in them is checked one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.loss import _Loss
from torch.nn.modules.padding import _ReflectionPadNd, _ReplicationPadNd

from hvdlite.torch.sync_batch_norm import SyncBatchNorm

_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d)
_PADS: tuple[Any, ...] = (nn.ConstantPad2d, nn.CircularPad2d, _ReflectionPadNd, _ReplicationPadNd)
# They work along their attribute `dim`.
_ALONG = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU, nn.CosineSimilarity, nn.Unflatten)
# Packages whose modules must be known; the rest of torch wraps and parametrizes other modules.
_CHECKED = ("torch.nn.modules.", "torch.jit.", "torch.ao.")
# They look at one pixel at a time, at its channels, or have no forward of their own. Losses are
# means over a slice, as the page says.
_RIGHT: frozenset[type] = frozenset(
    (
        nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict,
        nn.CELU, nn.ELU, nn.GELU, nn.Hardshrink, nn.Hardsigmoid, nn.Hardswish, nn.Hardtanh,
        nn.LeakyReLU, nn.LogSigmoid, nn.Mish, nn.PReLU, nn.ReLU, nn.ReLU6, nn.RReLU, nn.SELU,
        nn.SiLU, nn.Sigmoid, nn.Softplus, nn.Softshrink, nn.Softsign, nn.Tanh, nn.Tanhshrink,
        nn.Threshold, nn.Softmax2d, nn.ChannelShuffle, nn.CrossMapLRN2d, nn.LocalResponseNorm,
        nn.PixelShuffle, nn.PixelUnshuffle, nn.Dropout, nn.AlphaDropout, nn.Identity, nn.Embedding,
        nn.Linear, nn.LazyLinear,  # Where `Along` allows it.
    )
)  # fmt: skip
# Classes of modules -> why, and what to use.
_REFUSED: list[tuple[tuple[Any, ...], str]] = [
    (
        (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d),
        "would pool this rank's slice alone: take the mean of the slice in your own forward, and "
        "hvd.allreduce it",
    ),
    ((nn.FractionalMaxPool2d,), "pools across the border of a slice"),
    (
        (_InstanceNorm, nn.GroupNorm),
        "would normalize by the mean and the variance of a slice: use hvd.SyncBatchNorm",
    ),
    (
        (nn.LayerNorm,),
        "may normalize over the dimension that is cut: use hvd.SyncBatchNorm, or normalize over "
        "channels in your own forward",
    ),
    ((nn.Unfold, nn.Fold), "reaches across the border of a slice: call hvd.halo before it"),
    ((nn.Flatten,), "would make features of a slice those of an image: pool first"),
    (
        (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout),
        "draws other channels for each slice of an image: use nn.Dropout",
    ),
]


def check_module(path: str, module: nn.Module, index: int, spatial: type) -> None:
    """Raise `ValueError` for a module that would be wrong on slices along H (0) or W (1).

    `spatial` is the class of convolutions that are cut already.
    """
    reason = _objection(module, index, spatial)
    if reason:
        raise ValueError(f"{path or 'module'} is {type(module).__name__}, which {reason}")


def check_inputs(path: str, module: nn.Module, index: int) -> None:
    """Have a module that passed `check_module` refuse inputs for which it is wrong on slices."""
    if isinstance(module, _POOLS):
        module.register_forward_pre_hook(Divides(path, index))
    elif isinstance(module, (nn.Linear, *_ALONG)):
        module.register_forward_pre_hook(Along(path, index))


def _objection(module: nn.Module, index: int, spatial: type) -> str:
    """Return why the module cannot be wrapped; empty where it can."""
    if isinstance(module, _ConvNd):
        return _objection_to_convolution(module, spatial)
    if isinstance(module, _BatchNorm):
        wrong = "would normalize by the mean and the variance of a slice: use hvd.SyncBatchNorm"
        return "" if isinstance(module, SyncBatchNorm) else wrong
    for classes, objection in _OBJECTIONS:
        if isinstance(module, classes):
            return objection(module, index)
    for classes, reason in _REFUSED:
        if isinstance(module, classes):
            return reason
    base = next(each for each in type(module).__mro__ if each.__module__.startswith("torch."))
    if base in _RIGHT or issubclass(base, _Loss) or not base.__module__.startswith(_CHECKED):
        return ""
    return (
        "is not known to be right on slices: if it looks at one pixel at a time, call what it does "
        "in a forward of your own, and hvd.halo before it if it looks at the neighbours"
    )


def _objection_to_upsampling(module: Any, index: int) -> str:
    if not module.mode.startswith("nearest"):
        return (
            f"interpolates across the border of a slice by mode {module.mode!r}: use mode "
            "'nearest' with a scale, or hvd.halo"
        )
    scale = module.scale_factor
    if scale is None:
        return (
            f"would make each slice as large as the whole image: give scale_factor=, an int, "
            f"instead of size={module.size}"
        )
    along = scale[index] if isinstance(scale, tuple) else scale
    if along < 1 or along != int(along):
        return (
            f"has the scale {along:g} along dimension {index + 2}, by which the pixels of a slice "
            "depend on where it begins: use a whole number"
        )
    return ""


def _objection_along(module: Any, index: int) -> str:
    if module.dim in (index + 2, index - 2):
        return _looks_along(module.dim)
    return ""


def _looks_along(dim: int) -> str:
    return (
        f"works along dimension {dim}, which is cut: use one that is whole, such as 1, the "
        "channels (for Linear: a Conv2d of kernel 1, or pool first)"
    )


def _objection_to_padding(module: Any, index: int) -> str:
    padding = module.padding
    left, right, top, bottom = padding if len(padding) == 4 else (*padding, 0, 0)
    if any((top, bottom) if index == 0 else (left, right)):
        return "would pad each slice: give the padding to the convolution"
    return ""


def _objection_to_convolution(module: Any, spatial: type) -> str:
    if not isinstance(module, nn.Conv2d):
        return "is no Conv2d, and would miss the edges of the neighbours: call hvd.halo before it"
    if type(module) not in (nn.Conv2d, spatial):
        return (
            "changes Conv2d in ways that wrap cannot see: give a plain Conv2d (a lazy one has run "
            "once), or call hvd.halo before it"
        )
    if module.padding_mode == "circular":
        return (
            "pads with the other end of the image, padding_mode='circular': that is another rank's"
        )
    for index in (0, 1):
        first = module._reversed_padding_repeated_twice[2 - 2 * index]
        extent = module.dilation[index] * (module.kernel_size[index] - 1)
        if first > extent:
            return (
                f"pads {first} entries along dimension {index + 2}, and its kernel reaches over "
                f"{extent} beside the first: outputs would belong to no slice"
            )
    return ""


def _objection_to_pooling(module: Any, index: int) -> str:
    def along(value: Any) -> int:
        return int(value[index] if isinstance(value, tuple) else value)

    kernel = along(module.kernel_size)
    stride = along(module.stride if module.stride is not None else module.kernel_size)
    padding = along(getattr(module, "padding", 0))
    dilation = along(getattr(module, "dilation", 1))
    if kernel == stride and padding == 0 and dilation == 1:
        return ""
    return (
        f"pools across the border of a slice (kernel {kernel}, stride {stride}, padding {padding}, "
        f"dilation {dilation}): use windows that do not overlap, or hvd.halo before it"
    )


# Classes of modules -> what tells why one of them cannot be wrapped.
_OBJECTIONS: list[tuple[tuple[Any, ...], Callable[[Any, int], str]]] = [
    ((*_POOLS, nn.MaxUnpool2d), _objection_to_pooling),
    (_PADS, _objection_to_padding),
    ((nn.Upsample,), _objection_to_upsampling),
    (_ALONG, _objection_along),
]


@dataclass(frozen=True)
class Divides:
    """A hook that refuses a slice whose last window would need a neighbour's entries."""

    path: str
    index: int

    def __call__(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """Raise `ValueError` for such a slice."""
        kernel = module.kernel_size
        window = kernel[self.index] if isinstance(kernel, tuple) else kernel
        shape, dim = tuple(inputs[0].shape), self.index - 2
        if shape[dim] % window:
            raise ValueError(
                f"{self.path or 'module'} is {type(module).__name__}, whose windows of {window} do "
                f"not divide the slice, of shape {shape} with {shape[dim]} entries along "
                f"dimension {dim}: it would pool across the border"
            )


@dataclass(frozen=True)
class Along:
    """A hook that refuses an image where the module works along the dimension that is cut.

    Which one that is depends on whether the image has a batch dimension. Inputs of 2 dimensions are
    no images, but features of the samples.
    """

    path: str
    index: int

    def __call__(self, module: Any, inputs: tuple[Any, ...]) -> None:
        """Raise `ValueError` for such an image."""
        dim = -1 if isinstance(module, nn.Linear) else module.dim
        dims = inputs[0].dim()
        if dims > 2 and dim is not None and dim % dims == dims - 2 + self.index:
            raise ValueError(
                f"{self.path or 'module'} is {type(module).__name__}, which {_looks_along(dim)}. "
                f"The input has the shape {tuple(inputs[0].shape)}"
            )
