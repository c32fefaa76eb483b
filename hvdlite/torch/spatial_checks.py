"""What `SpatialConv2d.wrap` refuses: modules that compute something else on a slice of an image."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.padding import _ReflectionPadNd, _ReplicationPadNd

from hvdlite.torch.sync_batch_norm import SyncBatchNorm

_POOLS = (nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d)
_PADS: tuple[Any, ...] = (nn.ConstantPad2d, nn.CircularPad2d, _ReflectionPadNd, _ReplicationPadNd)
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
]


def check_module(path: str, module: nn.Module, index: int) -> None:
    """Raise `ValueError` for a module that would be wrong on slices along H (0) or W (1)."""
    reason = _objection(module, index)
    if reason:
        raise ValueError(f"{path or 'module'} is {type(module).__name__}, which {reason}")
    if isinstance(module, _POOLS):
        module.register_forward_pre_hook(_divides(path, index))


def _objection(module: nn.Module, index: int) -> str:
    """Return why the module cannot be wrapped; empty where it can."""
    if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
        return "would normalize by the mean and the variance of a slice: use hvd.SyncBatchNorm"
    found = ""
    if isinstance(module, _ConvNd):
        found = _objection_to_convolution(module)
    elif isinstance(module, _POOLS):
        found = _objection_to_pooling(module, index)
    elif isinstance(module, _PADS):
        found = _objection_to_padding(module, index)
    if found:
        return found
    if isinstance(module, nn.Upsample) and module.mode != "nearest":
        return (
            f"interpolates across the border of a slice by mode {module.mode!r}: use mode "
            "'nearest' with a scale, or hvd.halo"
        )
    return next((reason for classes, reason in _REFUSED if isinstance(module, classes)), "")


def _objection_to_padding(module: Any, index: int) -> str:
    padding = module.padding
    left, right, top, bottom = padding if len(padding) == 4 else (*padding, 0, 0)
    if any((top, bottom) if index == 0 else (left, right)):
        return "would pad each slice: give the padding to the convolution"
    return ""


def _objection_to_convolution(module: Any) -> str:
    if not isinstance(module, nn.Conv2d):
        return "is no Conv2d, and would miss the edges of the neighbours: call hvd.halo before it"
    from hvdlite.torch.spatial import SpatialConv2d

    if type(module) not in (nn.Conv2d, SpatialConv2d):
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


def _divides(path: str, index: int) -> Any:
    """Return a hook that refuses a slice whose last window would need a neighbour's entries."""

    def check(module: Any, inputs: tuple[Any, ...]) -> None:
        kernel = module.kernel_size
        window = kernel[index] if isinstance(kernel, tuple) else kernel
        shape = tuple(inputs[0].shape)
        if shape[index - 2] % window:
            raise ValueError(
                f"{path or 'module'} is {type(module).__name__}, whose windows of {window} do not "
                f"divide the slice, of shape {shape} with {shape[index - 2]} entries along "
                f"dimension {index - 2}: it would pool across the border"
            )

    return check
