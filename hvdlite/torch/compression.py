"""`Compression`: smaller dtypes for gradients while they are sent between ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from hvdlite.common.tensors.compression import Compressor, FeedbackCompressions, NoneCompressor


class CastCompressor(Compressor):
    """Sends floating-point tensors as another, smaller dtype; all others as they are."""

    dtype: ClassVar[torch.dtype]

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as `dtype`, and its own dtype."""
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def compress_into(cls, memory: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
        """Compress as `compress` does, into `memory` if this has the right shape.

        `memory` is an earlier result; the first touch of new memory costs more than the cast.
        ``tensor.copy_(result)`` decompresses.
        """
        if not tensor.is_floating_point() or tensor.dtype is cls.dtype:
            return tensor
        if memory is None or memory.shape != tensor.shape or memory.device != tensor.device:
            memory = torch.empty_like(tensor, dtype=cls.dtype)
        return memory.copy_(tensor)

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor as its own dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(CastCompressor):
    """Sends floating-point tensors as float16: values beyond 65504 become infinite."""

    dtype = torch.float16


class BF16Compressor(CastCompressor):
    """Sends floating-point tensors as bfloat16: the range of float32 with 8 bits of precision."""

    dtype = torch.bfloat16


class Compression(FeedbackCompressions):
    """The values of ``compression=``; a subclass of `Compressor` of your own works too."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
