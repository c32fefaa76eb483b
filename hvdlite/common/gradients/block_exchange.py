"""The exchange of blocks of elements in codes of few bits.

Each rank adds up the codes of its share of the blocks, and sends the sum to all in the same code.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.lists import split_rows
from hvdlite.common.gradients.compressed_bucket import CHUNK_ELEMENTS, Bucket, Exchange, add, fail
from hvdlite.common.tensors.compression import Int8, OneBit
from hvdlite.common.tensors.numpy_adapter import Array

# Codes of few bits for blocks of floats, each with its own scale.
#
# A matrix of float32 has a block in each row. Its code is a row of bytes: scales, then elements.


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


def blockwise(bucket: Bucket, code: BlockCode) -> Exchange:
    blocks = [-(-part.values.size // code.block) for part in bucket.parts]
    residuals = [
        bucket.state.residual(part.name, (rows, code.block))
        for part, rows in zip(bucket.parts, blocks, strict=True)
    ]
    counts = np.concatenate([_counts(part.values.size, code.block) for part in bucket.parts])
    coded = np.empty((sum(blocks), code.row_bytes), np.uint8)
    places = np.cumsum([0, *blocks]).tolist()
    for part, residual, place in zip(bucket.parts, residuals, places, strict=False):
        add(residual, part)
        end = place + len(residual)
        _encode(code, residual, coded[place:end], counts[place:end])
    shares = split_rows(len(coded), bucket.members)
    (received,) = yield bucket.start("alltoall", "shares", coded, shares)
    own = bucket.state.process_set.rank() or 0
    first = sum(shares[:own])
    if len(received) != shares[own] * bucket.members:
        # A rank without a share cannot see it here, but that these sums are missing.
        yield bucket.start("allgather", "sums", coded[:0])
        raise _joined(bucket)
    counted = counts[first : first + shares[own]]
    total = np.zeros((shares[own], code.block), np.float32)
    for rank in range(bucket.members):
        share = received[rank * shares[own] : (rank + 1) * shares[own]]
        _add_decoded(code, share, total, counted)
    coded_total = np.empty((shares[own], code.row_bytes), np.uint8)
    _encode(code, total, coded_total, counted)
    operation = bucket.start("allgather", "sums", coded_total)
    # The sum is sent on with an error too. Whoever has made it adds it to its own residual.
    for residual, place in zip(residuals, places, strict=False):
        begin, end = max(place, first), min(place + len(residual), first + len(total))
        if begin < end:
            residual[begin - place : end - place] += total[begin - first : end - first]
    (sums,) = yield operation
    if len(sums) != len(coded):
        raise _joined(bucket)
    for part, residual, place in zip(bucket.parts, residuals, places, strict=False):
        rows = sums[place : place + len(residual)]
        if np.isfinite(code.scales(rows)).all():
            _decode_to(code, rows, part.values, bucket.factor, counts[place : place + len(rows)])
        else:
            fail(part, residual)


def _joined(bucket: Bucket) -> HorovodInternalError:
    return HorovodInternalError(
        f"a rank has joined, and Compression.{bucket.state.compressor} needs all ranks in each "
        "step: give all ranks as many batches, or use Compression.powersgd or topk",
        job_goes_on=True,
    )


def _counts(size: int, block: int) -> Array:
    counts = np.full(-(-size // block), block)
    counts[-1:] -= len(counts) * block - size
    return counts


def _encode(code: BlockCode, blocks: Array, coded: Array, counts: Array) -> None:
    rows = max(1, CHUNK_ELEMENTS // code.block)
    memory = np.empty((rows, code.block), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), rows):
            where = slice(start, start + rows)
            some = blocks[where]
            code.encode(some, coded[where], memory[: len(some)], counts[where])


def _add_decoded(code: BlockCode, coded: Array, total: Array, counts: Array) -> None:
    rows = max(1, CHUNK_ELEMENTS // code.block)
    memory = np.empty((rows, code.block), np.float32)
    for start in range(0, len(total), rows):
        where = slice(start, start + rows)
        some = total[where]
        code.decode(coded[where], memory[: len(some)], counts[where])
        np.add(some, memory[: len(some)], out=some)


def _decode_to(code: BlockCode, coded: Array, values: Array, factor: float, counts: Array) -> None:
    """Write what the code says, times `factor`, to a flat array, which may end within a block."""
    rows = max(1, CHUNK_ELEMENTS // code.block)
    memory = np.empty((rows, code.block), np.float32)
    for start in range(0, len(coded), rows):
        some = coded[start : start + rows]
        code.decode(some, memory[: len(some)], counts[start : start + rows])
        target = values[start * code.block : (start + len(some)) * code.block]
        decoded = memory.reshape(-1)[: target.size]
        np.multiply(decoded, np.float32(factor), out=target)
