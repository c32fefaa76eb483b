"""The exchange of blocks of elements in codes of few bits.

Each rank adds up the codes of its share of the blocks, and sends the sum to all in the same code.
"""

from __future__ import annotations

import numpy as np

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.gradients.block_codes import BlockCode
from hvdlite.common.gradients.compressed_bucket import CHUNK_ELEMENTS, Bucket, Exchange, add, fail
from hvdlite.common.plain.lists import split_rows
from hvdlite.common.plain.numpy_adapter import Array


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
