"""Gradients that are views of one flat buffer, so that nothing has to be packed or unpacked."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

ALIGNMENT_BYTES = 64  # what torch gives every tensor of its own: kernels are fastest on it


class FlatLayout:
    """Where each of some tensors lies in a flat buffer.

    Each part begins at a multiple of `ALIGNMENT_BYTES`, as kernels that read it want, and has the
    strides that torch gives to a gradient: those of its tensor, where that has no gaps. What lies
    between two parts, less than `ALIGNMENT_BYTES`, is zero in all buffers, and every step of an
    optimizer over it is harmless; a reduction carries it.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        """A layout for tensors of one dtype and device. Raises `ValueError` for others."""
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
        self.offsets: list[int] = []  # elements, as all numbers here
        self.ends: list[int] = []
        end = 0
        for tensor in tensors:
            begin = -(-end // granule) * granule
            end = begin + tensor.numel()
            self.offsets.append(begin)
            self.ends.append(end)
        self.size = end

    def allocate(self) -> torch.Tensor:
        """A buffer of zeros."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The parts of `buffer`, each with a version counter of its own.

        So what writes to one part does not look as if it had changed the others.
        """
        places = zip(self.shapes, self.strides, self.offsets, strict=True)
        return [buffer.data.as_strided(*place) for place in places]


class FlatGradients:
    """The gradients of the dense parameters of a segment, in one buffer.

    A gradient gets there by `take`, after backward; from then on backward accumulates into the
    buffer, until somebody sets ``p.grad`` to None or to another tensor. The parameters are laid
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
        self.buffer = self.layout.allocate()  # (size,), contiguous
        self._views = dict(zip(self.parameters, self.layout.views(self.buffer), strict=True))

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """The place of its gradient. Raises `KeyError` for a parameter of another segment."""
        return self._views[parameter]

    @torch.no_grad()
    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        """Let its gradient live here: copy the values if they lie elsewhere. Returns the view.

        Raises `ValueError` when there is no gradient, and `TypeError` for one that is sparse or
        of another dtype or device.
        """
        view, gradient = self._views[parameter], parameter.grad
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

    def _describe(self, parameter: torch.Tensor) -> str:
        name = self._names.get(parameter)
        if name is None:
            number = next(i for i, each in enumerate(self.parameters) if each is parameter)
            name = f"parameter {number} of the segment"
        return f"{name}, of shape {tuple(parameter.shape)},"
