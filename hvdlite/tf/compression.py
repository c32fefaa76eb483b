"""Gradients made smaller on their way between ranks: `Compression`."""

from __future__ import annotations

from typing import Any, ClassVar

import tensorflow as tf

from hvdlite.common.tensors.compression import Compressor, FeedbackCompressions, NoneCompressor


class _CastCompressor(Compressor):
    """Sends floating-point tensors as another, smaller dtype; all others as they are."""

    dtype: ClassVar[tf.DType]

    @classmethod
    def compress(cls, tensor: tf.Tensor) -> tuple[tf.Tensor, Any]:
        """Return the tensor as `dtype`, and the dtype that it had."""
        if not tensor.dtype.is_floating:
            return tensor, None
        return tf.cast(tensor, cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating-point tensors as float16: values beyond 65504 become infinite."""

    dtype = tf.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: the range of float32 with 8 bits of precision."""

    dtype = tf.bfloat16


class Compression(FeedbackCompressions):
    """What can be given as ``compression=``; a subclass of `Compressor` of your own works too."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
