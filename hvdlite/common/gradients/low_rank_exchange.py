"""powersgd: matrices are exchanged as products of two small ones.

Algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient
Compression for Distributed Optimization", NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hvdlite.common.gradients.compressed_bucket import (
    CHUNK_ELEMENTS,
    Bucket,
    Exchange,
    Part,
    add,
    fail,
    is_finite,
    pieces,
)
from hvdlite.common.gradients.error_feedback import matrix_shape
from hvdlite.common.plain.compression import PowerSGD
from hvdlite.common.plain.numpy_adapter import Array


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
