"""Codes of few bits for blocks of floats, each with its own scale.

A matrix of float32 has a block in each row. Its code is a row of bytes: scales, then elements.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hvdlite.common.plain.compression import Int8
from hvdlite.common.plain.numpy_adapter import Array

_SCALE_BYTES = 4
# Blocks are coded so many elements at a time, which stay in the cache of a core.
CHUNK_ELEMENTS = 1 << 16
# What has no larger element is sent as zeros: 127 divided by it would be infinite.
_TINY = 1e-30


class BlockCode(Protocol):
    """The code of blocks of `block` elements, `row_bytes` for each."""

    block: int
    row_bytes: int

    def encode(self, blocks: Array, code: Array, memory: Array) -> None:
        """Write the code of float32 `blocks`, and leave in them what it does not say.

        `memory` is as large as `blocks`. A block that is not finite has a scale that is NaN.
        """

    def decode(self, code: Array, blocks: Array) -> None:
        """Write to `blocks` what the code says."""

    def scales(self, code: Array) -> Array:
        """Return the scales of each row, float32."""


class Int8Code:
    """Whole numbers from -127 to 127, times the largest magnitude of the block / 127."""

    def __init__(self, compressor: Int8) -> None:
        self.block = compressor.block
        self.row_bytes = _SCALE_BYTES + compressor.block

    def encode(self, blocks: Array, code: Array, memory: Array) -> None:
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

    def decode(self, code: Array, blocks: Array) -> None:
        np.multiply(self._numbers(code), self.scales(code), out=blocks)

    def scales(self, code: Array) -> Array:
        return code[:, :_SCALE_BYTES].view(np.float32)

    def _numbers(self, code: Array) -> Array:
        return code[:, _SCALE_BYTES:].view(np.int8)
