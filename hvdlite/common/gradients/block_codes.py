"""Codes of few bits for blocks of floats, each with its own scale.

A matrix of float32 has a block in each row. Its code is a row of bytes: scales, then elements.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hvdlite.common.plain.compression import Int8, OneBit
from hvdlite.common.plain.numpy_adapter import Array

_SCALE_BYTES = 4
# What has no larger element is sent as zeros: 127 divided by it would be infinite.
_TINY = 1e-30


class BlockCode(Protocol):
    """The code of blocks of `block` elements, `row_bytes` for each."""

    block: int
    row_bytes: int

    def encode(self, blocks: Array, code: Array, memory: Array, counts: Array) -> None:
        """Write the code of float32 `blocks`, and leave in them what it does not say.

        The first `counts` elements of each block count; the others are zeros, and stay so. `memory`
        is as large as `blocks`. A block that is not finite has a scale that is not.
        """

    def decode(self, code: Array, blocks: Array, counts: Array) -> None:
        """Write to `blocks` what the code says, and zeros after their first `counts` elements."""

    def scales(self, code: Array) -> Array:
        """Return the scales of each row, float32."""


class Int8Code:
    """Whole numbers from -127 to 127, times the largest magnitude of the block / 127."""

    def __init__(self, compressor: Int8) -> None:
        self.block = compressor.block
        self.row_bytes = _SCALE_BYTES + compressor.block

    def encode(self, blocks: Array, code: Array, memory: Array, counts: Array) -> None:
        np.abs(blocks, out=memory)
        largest = memory.max(axis=1, keepdims=True)
        sent = largest > _TINY
        scales = np.where(sent, largest / np.float32(127), np.float32(0))
        scales[~np.isfinite(largest)] = np.nan
        steps = np.divide(1, scales, out=np.zeros_like(scales), where=sent)
        np.multiply(blocks, steps, out=memory)
        np.rint(memory, out=memory)
        self.scales(code)[:] = scales
        np.copyto(self._numbers(code), memory, casting="unsafe")
        np.multiply(memory, scales, out=memory)
        np.subtract(blocks, memory, out=blocks)

    def decode(self, code: Array, blocks: Array, counts: Array) -> None:
        np.multiply(self._numbers(code), self.scales(code), out=blocks)

    def scales(self, code: Array) -> Array:
        return code[:, :_SCALE_BYTES].view(np.float32)

    def _numbers(self, code: Array) -> Array:
        return code[:, _SCALE_BYTES:].view(np.int8)


class OneBitCode:
    """A bit for each sign, and the means of the elements that have it.

    Seide, Fu, Droppo, Li and Yu, "1-Bit Stochastic Gradient Descent and its Application to
    Data-Parallel Distributed Training of Speech DNNs", Interspeech 2014; by blocks, not columns.
    """

    def __init__(self, compressor: OneBit) -> None:
        self.block = compressor.block
        self.row_bytes = 2 * _SCALE_BYTES + compressor.block // 8

    def encode(self, blocks: Array, code: Array, memory: Array, counts: Array) -> None:
        negative = np.signbit(blocks)
        below = np.count_nonzero(negative, axis=1)
        sums = blocks.sum(axis=1)
        np.abs(blocks, out=memory)
        magnitudes = memory.sum(axis=1)
        scales = self.scales(code)
        # Of no element of a sign, the sum is 0 but for rounding, and the mean is not used.
        scales[:, 0] = (magnitudes + sums) / (2 * np.maximum(counts - below, 1))
        scales[:, 1] = (sums - magnitudes) / (2 * np.maximum(below, 1))
        code[:, 2 * _SCALE_BYTES :] = np.packbits(negative, axis=1)
        self.decode(code, memory, counts)
        np.subtract(blocks, memory, out=blocks)

    def decode(self, code: Array, blocks: Array, counts: Array) -> None:
        negative = np.unpackbits(code[:, 2 * _SCALE_BYTES :], axis=1)
        scales = self.scales(code)
        np.multiply(negative, scales[:, 1:] - scales[:, :1], out=blocks)
        np.add(blocks, scales[:, :1], out=blocks)
        for row in np.flatnonzero(counts < self.block):
            blocks[row, counts[row] :] = 0

    def scales(self, code: Array) -> Array:
        return code[:, : 2 * _SCALE_BYTES].view(np.float32)
