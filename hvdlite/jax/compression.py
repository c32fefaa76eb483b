"""Gradients made smaller on their way between ranks: `Compression`."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from hvdlite.common.tensors.compression import Compressor, FeedbackCompressions, NoneCompressor


class _CastCompressor(Compressor):
    """Sends floating-point arrays as another, smaller dtype; all others as they are."""

    dtype: ClassVar[Any]

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Return the array as `dtype`, and the dtype that it had."""
        array = jnp.asarray(tensor)
        if not jnp.issubdtype(array.dtype, jnp.floating):
            return array, None
        return array.astype(cls.dtype), array.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the array in the dtype that it had."""
        return tensor if ctx is None else tensor.astype(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point arrays as float16: values beyond 65504 become infinite."""

    dtype = jnp.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point arrays as bfloat16: the range of float32 with 8 bits of precision."""

    dtype = jnp.bfloat16


class Compression(FeedbackCompressions):
    """What can be given as ``compression=``; a subclass of `Compressor` of your own works too."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
