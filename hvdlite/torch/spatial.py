"""`SpatialConv2d`: a convolution of images that are cut along their height or their width.

The convolution gets the edges of the neighbours' slices by `halo`. Its output is the slice that
belongs to the slice of its input:

    kernel 3, stride 1, padding 1, 2 ranks         kernel 3, stride 2, padding 1
    input    p a b c d | e f g h p                 p a b c d | e f g h p
    rank 0   p a b c d   e        -> 4 outputs     p a b c d            -> 2 outputs
    rank 1           d   e f g h p                         d   e f g h  -> 2 outputs

Output o of the whole image begins at entry ``o * stride - padding``. A slice that begins at a
multiple of the stride therefore needs `padding` entries before it, and what is left of the kernel
behind its last output. The border of the whole image is padded by the ranks that hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.torch.mpi_ops import halo
from hvdlite.torch.spatial_checks import check_inputs, check_module

Tensor = torch.Tensor
_DIMS = {2: 0, 3: 1, -2: 0, -1: 1}  # the index in kernel_size and the like, by dimension


class SpatialConv2d(nn.Conv2d):
    """A ``torch.nn.Conv2d`` of which each rank computes a slice; made by `wrap`.

    Input has the shape ``(N, C, H, W)`` or ``(C, H, W)``, and is this rank's slice along one or
    both of H and W. The output is that slice of the output of the whole image, which a plain
    convolution gives. Kernel, stride, dilation, groups, bias and padding are those of the
    convolution that was wrapped; padding by "circular" is refused.

    Forward and backward each run one alltoall along each dimension that is cut; all ranks must take
    part in both. The gradients of weight and bias are those of this rank's slice of the output.

    `forward` raises `ValueError` where the stride does not divide the slice, and where the kernel
    reaches beyond the neighbour's slice.
    """

    # The ranks along which each dimension is cut, by the index of the dimension: 0 is the height.
    _cuts: dict[int, ProcessSet]
    # The path of this module in the model; None: its halos are numbered.
    _path: str | None

    @classmethod
    def wrap(
        cls, module: nn.Module, dim: int, process_set: ProcessSet = global_process_set
    ) -> nn.Module:
        """Return `module` for images that are cut along `dim`: 2 is the height, 3 is the width.

        `module` is a ``torch.nn.Conv2d``, or any module: every convolution in it is replaced, in
        place, by one that has the same parameters under the same names. The slices lie on the ranks
        of `process_set`, in their order. Images that are cut along both dimensions need a second
        call, with the ranks of the other dimension.

        Raises `ValueError` for another dimension, and for modules that would compute something else
        on slices, each with what to use: batch normalization over the slice alone, pooling across
        its border, and others. Modules of torch must be known to be right; those of your own pass,
        as it cannot see what their `forward` does. Some, such as ``torch.nn.Linear``, raise
        `ValueError` at the first input that they would be wrong for.
        """
        if dim not in _DIMS:
            raise ValueError(
                f"dim={dim!r} must be 2, the height of an image, or 3, its width (or -2, -1)"
            )
        index = _DIMS[dim]
        for path, part in module.named_modules():
            check_module(path, part, index, cls)
        for path, part in module.named_modules():
            check_inputs(path, part, index)
        if isinstance(module, nn.Conv2d):
            return cls._of(module, index, process_set, None)
        replaced: dict[int, SpatialConv2d] = {}
        for path, parent in list(module.named_modules()):
            for name, child in parent.named_children():
                if isinstance(child, nn.Conv2d) and id(child) not in replaced:
                    label = f"{path}.{name}" if path else name
                    replaced[id(child)] = cls._of(child, index, process_set, label)
        for parent in list(module.modules()):
            for name, child in list(parent._modules.items()):
                if id(child) in replaced:
                    parent._modules[name] = replaced[id(child)]
        return module

    @classmethod
    def _of(
        cls, conv: nn.Conv2d, index: int, process_set: ProcessSet, path: str | None
    ) -> SpatialConv2d:
        spatial = cls.__new__(cls)
        spatial.__dict__.update(vars(conv))  # The parameters and the hooks, above all.
        cuts = conv._cuts if isinstance(conv, SpatialConv2d) else {}
        spatial._cuts = {**cuts, index: process_set}
        spatial._path = path
        return spatial

    def forward(self, input: Tensor) -> Tensor:
        """Return this rank's slice of the output."""
        left, right, top, bottom = self._reversed_padding_repeated_twice
        paddings = [(top, bottom), (left, right)]
        for index, process_set in self._cuts.items():
            if process_set.size() > 1:
                input, paddings[index] = self._with_edges(
                    input, index, process_set, paddings[index]
                )
        (top, bottom), (left, right) = paddings
        padding: Any = 0
        if self.padding_mode == "zeros" and top == bottom and left == right:
            padding = (top, left)
        elif any((top, bottom, left, right)):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input = functional.pad(input, (left, right, top, bottom), mode)
        return functional.conv2d(
            input, self.weight, self.bias, self.stride, padding, self.dilation, self.groups
        )

    def _with_edges(
        self, input: Tensor, index: int, process_set: ProcessSet, padding: tuple[int, int]
    ) -> tuple[Tensor, tuple[int, int]]:
        """Return the slice with its neighbours' edges, and the padding that is left to do."""
        first, last = padding
        stride = self.stride[index]
        extent = self.dilation[index] * (self.kernel_size[index] - 1)
        dim = index - 2
        size = input.shape[dim]
        if size % stride:
            raise ValueError(
                f"{self._name()}: the stride {stride} does not divide the slice, of shape "
                f"{tuple(input.shape)} with {size} entries along dimension {dim}: the outputs of "
                "other ranks would begin in the midst of a step. Cut images whose size is a "
                "multiple of stride and ranks"
            )
        if size + first + last <= extent:  # All ranks see it, as their slices are alike.
            raise ValueError(
                f"{self._name()}: the last slice of dimension {dim}, with {size} entries, holds no "
                f"output of a kernel that reaches over {extent + 1}: cut the image among fewer "
                f"ranks than {process_set.size()}"
            )
        label = None if self._path is None else f"spatial.{self._path}.{dim}"
        before, after = first, max(0, extent - first - stride + 1)
        input = halo(input, dim, before, after, process_set, fill=None, name=label)
        position = process_set.rank()
        return input, (
            first if position == 0 else 0,
            last if position == process_set.size() - 1 else 0,
        )

    def _name(self) -> str:
        return f"SpatialConv2d {self._path}" if self._path else "SpatialConv2d"

    def extra_repr(self) -> str:
        """Return the arguments of the convolution, and the dimensions that are cut."""
        arguments = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{arguments}, cut={sorted(index + 2 for index in self._cuts)}"


__all__ = ["SpatialConv2d"]
