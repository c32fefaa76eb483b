"""The exchange of a bucket of gradients by a compressor with error feedback."""

from __future__ import annotations

import numpy as np

from hvdlite.common.api.submit import Operation
from hvdlite.common.gradients.block_codes import Int8Code, OneBitCode
from hvdlite.common.gradients.block_exchange import blockwise
from hvdlite.common.gradients.compressed_bucket import Bucket, Exchange, pieces
from hvdlite.common.gradients.low_rank_exchange import powersgd
from hvdlite.common.gradients.sparse_exchange import topk
from hvdlite.common.plain.compression import Int8, OneBit, PowerSGD, TopK
from hvdlite.common.plain.numpy_adapter import Array


class CompressedBucket:
    """A bucket in flight."""

    def __init__(self, bucket: Bucket) -> None:
        """Compress, and start the first collective. Raises as this does."""
        self._exchange = _exchange_of(bucket)
        with np.errstate(all="ignore"):  # What is not finite is dealt with.
            self._operation: Operation[Array] | None = next(self._exchange)

    @property
    def operation(self) -> Operation[Array] | None:
        """The collective in flight; None when the results are written."""
        return self._operation

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
        with np.errstate(all="ignore"):
            self._operation = _next_of(self._exchange, operation.wait_for_tensors())


def _next_of(exchange: Exchange, results: list[Array]) -> Operation[Array] | None:
    """Give an exchange the results that it waits for; return what it waits for next."""
    try:
        return exchange.send(results)
    except StopIteration:
        return None


def _exchange_of(bucket: Bucket) -> Exchange:
    steps = bucket.state.count([part.name for part in bucket.parts])
    match bucket.state.compressor:
        case Int8() as compressor:
            return blockwise(bucket, Int8Code(compressor))
        case PowerSGD() as compressor:
            return powersgd(bucket, compressor)
        case TopK() as compressor:
            return topk(bucket, compressor)
        case OneBit() as compressor:
            if steps < compressor.warmup_steps:
                return _whole(bucket)
            return blockwise(bucket, OneBitCode(compressor))
    raise TypeError(f"{bucket.state.compressor} is no compressor that there is")


def _whole(bucket: Bucket) -> Exchange:
    sent_pieces, sent = pieces([], [part.values.size for part in bucket.parts])
    for piece, part in zip(sent_pieces, bucket.parts, strict=True):
        piece[:] = part.values
    yield bucket.add_up("whole", sent)
    for piece, part in zip(sent_pieces, bucket.parts, strict=True):
        np.multiply(piece, np.float32(bucket.factor), out=part.values)
