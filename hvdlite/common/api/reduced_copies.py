"""The allreduce of gradients to new tensors, each under its own name or all as one group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from hvdlite.common.api.bundles import MOST_BYTES
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_bucket import COLLECTIVE, PreparedBucket, start_bucket
from hvdlite.common.api.submit import Operation, start, submit_each
from hvdlite.common.plain.adapter import Adapter
from hvdlite.common.plain.handles import Handle
from hvdlite.common.runtime.runtime import Runtime

T = TypeVar("T")


class ReducedCopies(Generic[T]):
    """Gradients of this rank on their way to the reduced ones, which are new tensors.

    Few bytes are copied and reduced in place, as a `PreparedBucket`, which can be one short call.
    More are not copied: the engine reads the gradients and writes the results.
    """

    def __init__(
        self,
        runtime: Runtime,
        adapter: Adapter[T],
        names: Sequence[str],
        tensors: Sequence[T],
        options: CallOptions,
        copy: Callable[[Sequence[T]], list[T]],
        *,
        nbytes: int,
        alone: bool = False,
    ) -> None:
        """Start to reduce `tensors`, of `nbytes` bytes; `copy` returns contiguous copies of them.

        With `alone` the caller waits next, and for nothing else. Raises as `PreparedBucket.start`.
        """
        self._bucket: PreparedBucket[T] | None = None
        self._operation: Operation[T] | None = None
        self._copies: list[T] = []
        if alone and nbytes <= MOST_BYTES:
            self._copies = copy(tensors)
            self._bucket = start_bucket(runtime, adapter, names, self._copies, options, alone=True)
        elif options.grouped:
            entries = start(runtime, adapter, COLLECTIVE, names[0], tensors, options)
            self._operation = Operation(entries)
        else:
            entries = submit_each(runtime, adapter, COLLECTIVE, names, tensors, options)
            self._operation = Operation(entries)

    @property
    def handles(self) -> list[Handle]:
        """The handles of what is in flight, which somebody else may wait for."""
        if self._bucket is not None:
            self._bucket.send()
            return [self._bucket.handle]
        assert self._operation is not None
        return [entry.handle for entry in self._operation.entries]

    def wait(self) -> list[T]:
        """Sleep until all are reduced, and return them. Raises the first error."""
        if self._bucket is not None:
            self._bucket.wait()
            return self._copies
        assert self._operation is not None
        return self._operation.wait_for_tensors()
