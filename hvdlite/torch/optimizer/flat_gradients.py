"""Gradients that are views of one flat buffer, so that nothing has to be packed or unpacked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

# [Note: views and version counters]
#
# torch counts the writes to every tensor (`tensor._version`), and raises an error when backward
# would use values that were overwritten after they had been saved. A tensor and its views share
# one counter, but ``tensor.data`` begins a new one. hvdlite writes to memory in ways that torch
# does not see, and decides for each counter whether it moves:
#
# * The views of a flat buffer are made from ``buffer.data``, so each has a counter of its own.
#   Otherwise a write to one gradient would look like a write to all gradients of the segment.
# * A gradient that is pending or in flight must not be written by the user, since the other ranks
#   would not see the change. `PendingGradient.check` compares its counter with the one it had when
#   it was complete. Results must not move the counter before that check. The engine thread
#   therefore writes through numpy, or into ``tensor.data`` (`devices.py`), and the counter moves
#   when the training thread has waited: `TorchAdapter.finish` increments it.
# * A fused step writes to the parameters through their flat buffer. It increments the counter of
#   every parameter afterwards (`FusedStep`), so that backward through a graph from before the step
#   is an error, as it is after torch's own step. The views of the count of steps share the counter
#   of their buffer on purpose: one comparison tells whether the user has changed any of them.

ALIGNMENT_BYTES = 64  # torch aligns every tensor so, and kernels are fastest on such memory.


class FlatLayout:
    """The places of several tensors in a flat buffer.

    Each place begins at a multiple of `ALIGNMENT_BYTES`, and has the strides that torch gives to a
    gradient: those of its tensor, where these leave no gaps. The padding between two places, less
    than `ALIGNMENT_BYTES`, is zero in all buffers. Reductions include it, and the step of an
    optimizer leaves zeros there.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """Lay out tensors of one dtype on one device. Raises `ValueError` for others."""
        if not tensors:
            raise ValueError("a flat buffer needs at least one tensor")
        self.dtype, self.device = tensors[0].dtype, tensors[0].device
        for number, tensor in enumerate(tensors):
            if (tensor.dtype, tensor.device) != (self.dtype, self.device):
                raise ValueError(
                    f"tensor {number} is {tensor.dtype} on {tensor.device}, the first is "
                    f"{self.dtype} on {self.device}: make one flat buffer for each kind"
                )
        granule = math.lcm(ALIGNMENT_BYTES, self.dtype.itemsize) // self.dtype.itemsize
        self.shapes = [tensor.shape for tensor in tensors]
        self.strides = [torch.empty_like(tensor, device="meta").stride() for tensor in tensors]
        # The first element of each place, and the one after its last; `size` counts elements too.
        self.offsets: list[int] = []
        self.ends: list[int] = []
        end = 0
        for tensor in tensors:
            begin = -(-end // granule) * granule
            end = begin + tensor.numel()
            self.offsets.append(begin)
            self.ends.append(end)
        self.size = end

    def allocate(self) -> torch.Tensor:
        """Return a buffer of zeros, of shape ``(size,)``."""
        if self.device.type != "cpu":
            return torch.zeros(self.size, dtype=self.dtype, device=self.device)
        # torch writes its zeros. Those of numpy take no memory before they are written, so that a
        # model needs no second copy of its gradients while they move here one by one.
        nbytes = self.size * self.dtype.itemsize
        zeros = np.zeros(nbytes + ALIGNMENT_BYTES, np.uint8)
        begin = -zeros.ctypes.data % ALIGNMENT_BYTES
        return torch.from_numpy(zeros[begin : begin + nbytes]).view(self.dtype)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Return one view of `buffer` for each tensor, each with a version counter of its own."""
        return [self.view(buffer, index) for index in range(len(self.shapes))]

    def view(self, buffer: torch.Tensor, index: int) -> torch.Tensor:
        """Return the view of `buffer` for one tensor."""
        place = self.shapes[index], self.strides[index], self.offsets[index]
        return buffer.data.as_strided(*place)


class FlatGradients:
    """The gradients of the dense parameters of a segment, in one buffer.

    `adopt` moves a gradient there after backward. From then on backward accumulates into the
    buffer, until the user sets ``p.grad`` to None or to another tensor. The parameters are laid
    out in the given order.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], names: Mapping[torch.Tensor, str] | None = None
    ) -> None:
        """Allocate the buffer; no ``p.grad`` changes. `names` are for the texts of errors.

        Raises `ValueError` for no parameter, for one that comes twice, and for parameters of
        several dtypes or devices.
        """
        if len(set(parameters)) < len(parameters):
            raise ValueError("a parameter comes twice: each has one gradient, and one place")
        self.parameters = tuple(parameters)
        self._names = names or {}
        self.layout = FlatLayout(self.parameters)
        self.buffer = self.layout.allocate()
        views = self.layout.views(self.buffer)
        # Each view with its address.
        self._views = {
            parameter: (view, view.data_ptr())
            for parameter, view in zip(self.parameters, views, strict=True)
        }

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the place of its gradient. Raises `KeyError` for one of another segment."""
        return self._views[parameter][0]

    @torch.no_grad()
    def adopt(self, parameter: torch.Tensor) -> torch.Tensor:
        """Make the view the gradient of this parameter, with the gradient's values; return it.

        Raises `ValueError` when there is no gradient, or one of another shape, and `TypeError` for
        one that is sparse or of another dtype or device.
        """
        (view, address), gradient = self._views[parameter], parameter.grad
        if view.data_ptr() != address:  # Module.to() and the like gave it other memory.
            view = self.layout.view(self.buffer, self._index_of(parameter))
            self._views[parameter] = view, view.data_ptr()
        if gradient is view:
            return view
        if gradient is None:
            raise ValueError(f"{self._describe(parameter)} has no gradient")
        self._check(parameter, gradient)
        if gradient.data_ptr() != view.data_ptr() or gradient.stride() != view.stride():
            view.copy_(gradient)
        parameter.grad = view
        return view

    def _check(self, parameter: torch.Tensor, gradient: torch.Tensor) -> None:
        if gradient.layout is not torch.strided:
            raise TypeError(
                f"the gradient of {self._describe(parameter)} is sparse: it has no place in a flat "
                "buffer; use sparse_as_dense=True, or leave the parameter out of the segment"
            )
        expected = self.layout.dtype, self.layout.device
        if (gradient.dtype, gradient.device) != expected:
            raise TypeError(
                f"the gradient of {self._describe(parameter)} is {gradient.dtype} on "
                f"{gradient.device}, its flat buffer is {expected[0]} on {expected[1]}: convert "
                "the model before the optimizer is wrapped"
            )
        shape = self.view(parameter).shape
        if gradient.shape != shape:
            raise ValueError(
                f"the gradient of {self._describe(parameter)} has no place in its flat buffer, "
                f"where the parameter had the shape {tuple(shape)}: resize parameters before the "
                "optimizer is wrapped, or wrap an optimizer anew"
            )

    def _index_of(self, parameter: torch.Tensor) -> int:
        members = enumerate(self.parameters)
        return next(index for index, member in members if member is parameter)

    def _describe(self, parameter: torch.Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            name = f"parameter {self._index_of(parameter)} of the segment"
        return f"{name}, of shape {tuple(parameter.shape)},"
