"""The exchange of a bucket of gradients by a compressor with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from hvdlite.common.api.submit import Operation
from hvdlite.common.gradients.block_exchange import Int8Code, OneBitCode, blockwise
from hvdlite.common.gradients.compressed_bucket import (
    CHUNK_ELEMENTS,
    Bucket,
    Exchange,
    Part,
    add,
    fail,
    is_finite,
    matrix_shape,
    pieces,
)
from hvdlite.common.tensors.compression import Int8, OneBit, PowerSGD, TopK
from hvdlite.common.tensors.numpy_adapter import Array

# Tensors of fewer elements are searched as a whole.
_FEW = 1 << 14
_SAMPLE_STRIDE = 61


class CompressedBucket:
    """A bucket in flight."""

    def __init__(self, bucket: Bucket) -> None:
        """Compress, and start the first collective. Raises as this does."""
        self._exchange = _exchange_of(bucket)
        with np.errstate(all="ignore"):  # What is not finite is dealt with.
            # The collective in flight; None when the results are written.
            self.operation: Operation[Array] | None = next(self._exchange)

    def advance(self) -> None:
        """Go on as far as is possible without waiting."""
        while self.operation is not None and self.operation.poll():
            self._resume()

    def advance_by_one(self) -> None:
        """Wait for the collective in flight, and go on to the next one."""
        if self.operation is not None:
            self._resume()

    def wait(self) -> None:
        """Go on until the results are written. Raises `HorovodInternalError`."""
        while self.operation is not None:
            self._resume()

    def _resume(self) -> None:
        operation, self.operation = self.operation, None
        assert operation is not None
        with np.errstate(all="ignore"), suppress(StopIteration):  # Where it was the last one.
            self.operation = self._exchange.send(operation.wait_for_tensors())


def _exchange_of(bucket: Bucket) -> Exchange:
    compressor = bucket.state.compressor
    if bucket.state.count([part.name for part in bucket.parts]) < compressor.warmup_steps:
        return _whole(bucket)
    match compressor:
        case Int8():
            return blockwise(bucket, Int8Code(compressor))
        case PowerSGD():
            return powersgd(bucket, compressor)
        case TopK():
            return topk(bucket, compressor)
        case OneBit():
            return blockwise(bucket, OneBitCode(compressor))
    raise TypeError(f"{compressor} is no compressor that there is")


def _whole(bucket: Bucket) -> Exchange:
    sent_pieces, sent = pieces([], [part.values.size for part in bucket.parts])
    for piece, part in zip(sent_pieces, bucket.parts, strict=True):
        piece[:] = part.values
    yield bucket.add_up("whole", sent)
    for piece, part in zip(sent_pieces, bucket.parts, strict=True):
        np.multiply(piece, np.float32(bucket.factor), out=part.values)


# topk: the largest elements of each tensor are gathered from all ranks, with their places.


def topk(bucket: Bucket, compressor: TopK) -> Exchange:
    """Exchange the largest elements of a bucket: first all places, then all values."""
    sizes = [part.values.size for part in bucket.parts]
    chosen = [math.ceil(compressor.ratio * size) for size in sizes]
    ends = np.cumsum([0, *chosen]).tolist()
    residuals = [
        bucket.state.residual(part.name, (size,))
        for part, size in zip(bucket.parts, sizes, strict=True)
    ]
    places = np.zeros(ends[-1], np.int32)
    values = np.zeros(ends[-1], np.float32)
    for part, residual, start, end in zip(bucket.parts, residuals, ends, ends[1:], strict=False):
        if is_finite(part.values):
            add(residual, part)
            where = largest(residual, end - start)
            places[start:end], values[start:end] = where, residual[where]
            residual[where] = 0
        else:
            values[start:end] = np.nan
    message = np.concatenate([places.view(np.uint8), values.view(np.uint8)])
    (received,) = yield bucket.start("allgather", "largest", message)
    # A rank that has joined has sent nothing.
    ranks = received.size // max(message.nbytes, 1)
    messages = received.reshape(ranks, 2, message.nbytes // 2)
    every_place, every_value = messages[:, 0].view(np.int32), messages[:, 1].view(np.float32)
    for part, residual, start, end in zip(bucket.parts, residuals, ends, ends[1:], strict=False):
        if np.isfinite(every_value[:, start:end]).all():
            part.values.fill(0)
            for where, some in zip(
                every_place[:, start:end], every_value[:, start:end], strict=True
            ):
                part.values[where] += some * np.float32(bucket.factor)
        else:
            fail(part, residual)


def largest(values: Array, count: int) -> Array:
    """Return the places, ascending, of the `count` elements of the largest magnitudes."""
    magnitudes = np.abs(values)
    candidates = None
    if values.size >= _FEW and count < values.size // 4:
        # A sample tells which elements cannot be among them, and the others are few.
        sample = magnitudes[::_SAMPLE_STRIDE]
        rank = min(len(sample), 2 * count // _SAMPLE_STRIDE + 16)
        least = np.partition(sample, len(sample) - rank)[len(sample) - rank]
        candidates = np.flatnonzero(magnitudes >= least)
        if len(candidates) < count:
            candidates = None
        else:
            magnitudes = magnitudes[candidates]
    picked = np.argpartition(magnitudes, len(magnitudes) - count)[len(magnitudes) - count :]
    return np.sort(picked if candidates is None else candidates[picked])


# powersgd: matrices are exchanged as products of two small ones.
#
# Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient
# Compression for Distributed Optimization", NeurIPS 2019.


def powersgd(bucket: Bucket, compressor: PowerSGD) -> Exchange:
    rank, state = compressor.rank, bucket.state
    shapes = [matrix_shape(part.shape, rank) for part in bucket.parts]
    matrices = [
        (part, state.residual(part.name, shape), state.factor(part.name, (shape[1], rank)))
        for part, shape in zip(bucket.parts, shapes, strict=True)
        if shape is not None
    ]
    whole = [part for part, shape in zip(bucket.parts, shapes, strict=True) if shape is None]
    lefts, sent = pieces(
        [(matrix.shape[0], rank) for _, matrix, _ in matrices],
        [part.values.size for part in whole],
    )
    for left, (part, matrix, factor) in zip(lefts, matrices, strict=False):
        if is_finite(part.values):
            add(matrix, part)
            np.matmul(matrix, factor, out=left)
        else:
            left.fill(np.nan)
    for piece, part in zip(lefts[len(matrices) :], whole, strict=True):
        piece[:] = part.values
    yield bucket.add_up("left", sent)
    for piece, part in zip(lefts[len(matrices) :], whole, strict=True):
        np.multiply(piece, np.float32(bucket.factor), out=part.values)
    yield from _second_factors(bucket, matrices, lefts[: len(matrices)])


def _second_factors(
    bucket: Bucket, matrices: Sequence[tuple[Part, Array, Array]], lefts: Sequence[Array]
) -> Exchange:
    """Exchange the other factors of matrices of which the sums of the first ones are there."""
    if not matrices:
        return
    rights, sent = pieces([factor.shape for _, _, factor in matrices], [])
    bases: list[Array | None] = []
    for left, right, (_, matrix, _) in zip(lefts, rights, matrices, strict=True):
        finite = is_finite(left.reshape(-1))
        base = np.linalg.qr(left)[0] if finite else None
        bases.append(base)
        if base is not None:
            # As matrix.T @ base, which takes twice the time.
            np.copyto(right, (base.T @ matrix).T)
    own = [right.copy() for right in rights]
    operation = bucket.add_up("right", sent)
    for base, right, (part, matrix, _) in zip(bases, own, matrices, strict=True):
        if base is None:
            fail(part, matrix)
        else:
            _subtract_product(matrix, base, right)
    yield operation
    for base, right, (part, matrix, factor) in zip(bases, rights, matrices, strict=True):
        if base is None:
            continue
        if not is_finite(right.reshape(-1)):
            fail(part, matrix)
            continue
        np.multiply(right, np.float32(bucket.factor), out=right)
        np.matmul(base, right.T, out=part.values.reshape(matrix.shape))
        # A column of zeros would find nothing in any later step.
        np.copyto(factor, right, where=right.any(axis=0))


def _subtract_product(matrix: Array, base: Array, right: Array) -> None:
    """Subtract ``base @ right.T`` in place, a few rows at a time, which stay in the cache."""
    rows = max(1, CHUNK_ELEMENTS // matrix.shape[1])
    memory = np.empty((rows, matrix.shape[1]), np.float32)
    for start in range(0, len(matrix), rows):
        some = matrix[start : start + rows]
        product = memory[: len(some)]
        np.matmul(base[start : start + rows], right.T, out=product)
        np.subtract(some, product, out=some)
