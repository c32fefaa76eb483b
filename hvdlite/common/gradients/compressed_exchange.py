"""The exchange of a bucket of gradients by a compressor with error feedback.

An exchange is a generator: it starts a collective, works on, and yields the operation when it needs
the result. That way one training thread has several buckets in flight, in every framework.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.api.submit import Operation
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.gradients.block_codes import CHUNK_ELEMENTS, BlockCode, Int8Code
from hvdlite.common.gradients.buckets import ReductionConfig
from hvdlite.common.gradients.error_feedback import FeedbackState, matrix_shape
from hvdlite.common.plain.compression import FeedbackCompressor, Int8, PowerSGD
from hvdlite.common.plain.lists import split_rows
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter

Exchange = Generator[Operation[Array], list[Array], None]
_RUNNER: EngineRunner[Array] = EngineRunner(NumpyAdapter())


class Part(NamedTuple):
    """A gradient of a bucket: flat contiguous float32, where the result is written to."""

    name: str
    values: Array
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Bucket:
    """Gradients that are exchanged together, the same ones in the same order on all ranks."""

    parts: Sequence[Part]
    state: FeedbackState
    factor: float  # of the sum over all ranks
    settings: str

    @classmethod
    def of(
        cls,
        parts: Sequence[Part],
        state: FeedbackState,
        reduction: ReductionConfig,
        settings: str = "",
    ) -> Bucket:
        """Return the bucket of gradients that are reduced as `reduction` says."""
        scaling = reduction.scaling
        factor = scaling.prescale_factor * scaling.postscale_factor
        if scaling.op is ReduceOp.AVERAGE:
            factor /= state.process_set.size()
        return cls(parts, state, factor, f"{settings} {reduction.compression_label}".strip())

    @property
    def members(self) -> int:
        """The number of ranks."""
        return self.state.process_set.size()

    def add_up(self, label: str, array: Array) -> Operation[Array]:
        """Start to replace an array by its sum over all ranks."""
        return self.start("allreduce", label, array, in_place=True)

    def start(
        self,
        collective: str,
        label: str,
        array: Array,
        splits: list[int] | None = None,
        in_place: bool = False,
    ) -> Operation[Array]:
        """Start a collective on one array."""
        options = CallOptions(
            self.state.process_set,
            ReduceOp.SUM,
            settings="" if splits else self.settings,
            splits=splits,
        )
        name = f"{self.parts[0].name}.{label}"
        return _RUNNER.start(collective, [array], name, options, in_place=in_place)


class CompressedBucket:
    """A bucket in flight."""

    def __init__(self, bucket: Bucket) -> None:
        """Compress, and start the first collective. Raises as this does."""
        self._exchange = _EXCHANGES[type(bucket.state.compressor)](bucket)
        self._operation: Operation[Array] | None = next(self._exchange)

    def advance(self) -> None:
        """Go on as far as is possible without waiting."""
        while self._operation is not None and self._operation.poll():
            self._resume()

    def advance_by_one(self) -> None:
        """Wait for the collective in flight, and go on to the next one."""
        if self._operation is not None:
            self._resume()

    def wait(self) -> None:
        """Go on until the results are written. Raises `HorovodInternalError`."""
        while self._operation is not None:
            self._resume()

    def _resume(self) -> None:
        operation, self._operation = self._operation, None
        assert operation is not None
        with np.errstate(all="ignore"):  # What is not finite is dealt with.
            self._operation = _next_of(self._exchange, operation.wait_for_tensors())


def _next_of(exchange: Exchange, results: list[Array]) -> Operation[Array] | None:
    """Give an exchange the results that it waits for; return what it waits for next."""
    try:
        return exchange.send(results)
    except StopIteration:
        return None


def is_finite(values: Array) -> bool:
    """Return whether all elements of a flat array are finite."""
    return bool(np.isfinite(np.dot(values, values))) or bool(np.isfinite(values).all())


def _add(residual: Array, part: Part) -> None:
    """Add a gradient to its residual, of which it is the beginning."""
    flat = residual.reshape(-1)[: part.values.size]
    np.add(flat, part.values, out=flat)


def _fail(part: Part, residual: Array) -> None:
    """Give a gradient that is not finite on some rank to all ranks, and begin anew after it."""
    part.values.fill(np.nan)
    residual.fill(0)


# -- powersgd: algorithms 1 and 2 of Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank
# Gradient Compression for Distributed Optimization", NeurIPS 2019


def _powersgd(bucket: Bucket, compressor: PowerSGD) -> Exchange:
    rank, state = compressor.rank, bucket.state
    shapes = [matrix_shape(part.shape, rank) for part in bucket.parts]
    matrices = [
        (part, state.residual(part.name, shape), state.factor(part.name, (shape[1], rank)))
        for part, shape in zip(bucket.parts, shapes, strict=True)
        if shape is not None
    ]
    whole = [part for part, shape in zip(bucket.parts, shapes, strict=True) if shape is None]
    lefts, sent = _pieces(
        [(matrix.shape[0], rank) for _, matrix, _ in matrices],
        [part.values.size for part in whole],
    )
    for left, (part, matrix, factor) in zip(lefts, matrices, strict=False):
        if is_finite(part.values):
            _add(matrix, part)
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
    rights, sent = _pieces([factor.shape for _, _, factor in matrices], [])
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
            _fail(part, matrix)
        else:
            _subtract_product(matrix, base, right)
    yield operation
    for base, right, (part, matrix, factor) in zip(bases, rights, matrices, strict=True):
        if base is not None:
            np.multiply(right, np.float32(bucket.factor), out=factor)
            np.matmul(base, factor.T, out=part.values.reshape(matrix.shape))


def _pieces(shapes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> tuple[list[Array], Array]:
    """Return views of these shapes, then flat ones, of one new array of zeros; and the array."""
    whole = [*shapes, *((size,) for size in sizes)]
    ends = np.cumsum([0, *(int(np.prod(shape)) for shape in whole)]).tolist()
    array = np.zeros(ends[-1], np.float32)
    return [
        array[start:end].reshape(shape)
        for start, end, shape in zip(ends, ends[1:], whole, strict=False)
    ], array


def _subtract_product(matrix: Array, base: Array, right: Array) -> None:
    """Subtract ``base @ right.T`` in place, a few rows at a time, which stay in the cache."""
    rows = max(1, CHUNK_ELEMENTS // matrix.shape[1])
    memory = np.empty((rows, matrix.shape[1]), np.float32)
    for start in range(0, len(matrix), rows):
        some = matrix[start : start + rows]
        product = memory[: len(some)]
        np.matmul(base[start : start + rows], right.T, out=product)
        np.subtract(some, product, out=some)


# -- 8 bits: a code of blocks; each rank adds up the codes of its share, and codes the sum


def _blockwise(bucket: Bucket, compressor: FeedbackCompressor, code: BlockCode) -> Exchange:
    blocks = [-(-part.values.size // code.block) for part in bucket.parts]
    residuals = [
        bucket.state.residual(part.name, (rows, code.block))
        for part, rows in zip(bucket.parts, blocks, strict=True)
    ]
    coded = np.empty((sum(blocks), code.row_bytes), np.uint8)
    places = np.cumsum([0, *blocks]).tolist()
    for part, residual, place in zip(bucket.parts, residuals, places, strict=False):
        _add(residual, part)
        _encode(code, residual, coded[place : place + len(residual)])
    shares = split_rows(len(coded), bucket.members)
    (received,) = yield bucket.start("alltoall", "shares", coded, shares)
    own = bucket.state.process_set.rank() or 0
    first = sum(shares[:own])
    if len(received) != shares[own] * bucket.members:
        raise HorovodInternalError(_JOINED.format(compressor))
    total = np.zeros((shares[own], code.block), np.float32)
    for rank in range(bucket.members):
        _add_decoded(code, received[rank * shares[own] : (rank + 1) * shares[own]], total)
    coded_total = np.empty((shares[own], code.row_bytes), np.uint8)
    _encode(code, total, coded_total)
    operation = bucket.start("allgather", "sums", coded_total)
    # The sum is sent on with an error too. Whoever has made it adds it to its own residual.
    for residual, place in zip(residuals, places, strict=False):
        begin, end = max(place, first), min(place + len(residual), first + len(total))
        if begin < end:
            residual[begin - place : end - place] += total[begin - first : end - first]
    (sums,) = yield operation
    if len(sums) != len(coded):
        raise HorovodInternalError(_JOINED.format(compressor))
    for part, residual, place in zip(bucket.parts, residuals, places, strict=False):
        rows = sums[place : place + len(residual)]
        if np.isfinite(code.scales(rows)).all():
            _decode_to(code, rows, part.values, bucket.factor)
        else:
            _fail(part, residual)


_JOINED = (
    "a rank has joined, and Compression.{} needs all ranks in each step: give all ranks as many "
    "batches, or use Compression.powersgd"
)


def _encode(code: BlockCode, blocks: Array, coded: Array) -> None:
    rows = max(1, CHUNK_ELEMENTS // code.block)
    memory = np.empty((rows, code.block), np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(blocks), rows):
            some = blocks[start : start + rows]
            code.encode(some, coded[start : start + rows], memory[: len(some)])


def _add_decoded(code: BlockCode, coded: Array, total: Array) -> None:
    rows = max(1, CHUNK_ELEMENTS // code.block)
    memory = np.empty((rows, code.block), np.float32)
    for start in range(0, len(total), rows):
        some = total[start : start + rows]
        code.decode(coded[start : start + rows], memory[: len(some)])
        np.add(some, memory[: len(some)], out=some)


def _decode_to(code: BlockCode, coded: Array, values: Array, factor: float) -> None:
    """Write what the code says, times `factor`, to a flat array, which may end within a block."""
    rows = max(1, CHUNK_ELEMENTS // code.block)
    memory = np.empty((rows, code.block), np.float32)
    for start in range(0, len(coded), rows):
        some = coded[start : start + rows]
        code.decode(some, memory[: len(some)])
        target = values[start * code.block : (start + len(some)) * code.block]
        decoded = memory.reshape(-1)[: target.size]
        np.multiply(decoded, np.float32(factor), out=target)


def _by_int8(bucket: Bucket) -> Exchange:
    assert isinstance(bucket.state.compressor, Int8)
    return _blockwise(bucket, bucket.state.compressor, Int8Code(bucket.state.compressor))


def _by_powersgd(bucket: Bucket) -> Exchange:
    assert isinstance(bucket.state.compressor, PowerSGD)
    return _powersgd(bucket, bucket.state.compressor)


_EXCHANGES: dict[type, Callable[[Bucket], Exchange]] = {Int8: _by_int8, PowerSGD: _by_powersgd}
