"""topk: the largest elements of each tensor are gathered from all ranks, with their places."""

from __future__ import annotations

import math

import numpy as np

from hvdlite.common.gradients.compressed_bucket import Bucket, Exchange, Part, add, fail, is_finite
from hvdlite.common.plain.compression import TopK
from hvdlite.common.plain.numpy_adapter import Array

# Tensors of fewer elements are searched as a whole.
_FEW = 1 << 14
_SAMPLE_STRIDE = 61


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
            _scatter(part, every_place[:, start:end], every_value[:, start:end], bucket.factor)
        else:
            fail(part, residual)


def _scatter(part: Part, places: Array, values: Array, factor: float) -> None:
    part.values.fill(0)
    for where, some in zip(places, values, strict=True):
        part.values[where] += some * np.float32(factor)


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
