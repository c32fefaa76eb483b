"""Prepared buckets: tensors that are reduced in place together, in one call, step after step.

What depends on names, shapes and dtypes alone is made once: requests and entries. A step with the
same tensors, or with others of the same properties, gives the entries new addresses and one handle
for all of them.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgpack

from hvdlite.common.api.call_checks import check_targets
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_calls import prepared, prepared_group
from hvdlite.common.api.submit import Operation, start, submit_each
from hvdlite.common.api.tensor_entries import PlacedEntry, PreparedCall, TensorEntry, entry_of
from hvdlite.common.requests.entries import Bundle, Entry
from hvdlite.common.requests.handles import Handle, SharedHandle
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import Adapter

if TYPE_CHECKING:
    from hvdlite.common.engine.engine import Engine

# Small buckets as one short call: their tensors pass together through shared memory.
#
# See [Note: short calls] in engine/short_calls.py. A step of a small model has one bucket, and the
# training threads of all ranks wait for it at about the same time: they exchange it themselves. The
# entries of its tensors are announced, and sent only where that has failed.


MOST_BYTES = 1 << 20  # Larger ones are no short calls.


def bundle_of(entries: Sequence[Entry]) -> Bundle | None:
    """Return the bundle of these entries; None where they cannot be exchanged as one."""
    if not 0 < sum(entry.size_bytes for entry in entries) <= MOST_BYTES:
        return None
    if len({entry.request.dtype for entry in entries}) > 1:
        return None
    if any(entry.address is None for entry in entries):
        return None
    # Ranks may have their gradients in different orders.
    ordered = sorted(entries, key=lambda entry: entry.request.name)
    requests = [entry.request for entry in ordered]
    text = msgpack.packb(requests, unicode_errors="backslashreplace")
    request = requests[0]._replace(
        name=f"bundle.{hashlib.blake2b(text, digest_size=16).hexdigest()}",
        shape=(sum(entry.count for entry in ordered),),
        group="",
        group_size=0,
    )
    return Bundle(request, ordered)


T = TypeVar("T")
COLLECTIVE = "allreduce"
_MOST_BUCKETS = 1000  # that are remembered


class PreparedBucket(Generic[T]):
    """The allreduce of tensors under these names: each on its own, or all as one group."""

    def __init__(self, adapter: Adapter[T], names: tuple[str, ...], options: CallOptions) -> None:
        self.options = options
        # Whether the tensors of the last `start` are in flight.
        self.busy = False
        self.adapter = adapter
        self._names = names
        self._calls: list[PreparedCall] = []
        self._entries: list[TensorEntry[T]] = []
        self._tensors: Sequence[T] = ()
        self.handle = SharedHandle(0)  # Of all tensors of the last `start`.
        # The entries as one short call, if they can be that; and the engine of entries that are
        # announced and not sent.
        self._bundle: Bundle | None = None
        self._unsent: Engine | None = None
        self.thread = 0  # that has announced them

    def start(self, runtime: Runtime, tensors: Sequence[T], *, alone: bool = False) -> None:
        """Enqueue the tensors; never waits.

        With `alone` the caller waits next, and for nothing else: all ranks may exchange the tensors
        in the threads that wait.

        Raises `ValueError` for what this rank can see to be wrong, and `HorovodInternalError` when
        the engine has ended. Nothing is in flight then.
        """
        handle = SharedHandle(len(tensors))
        if not self._renew(tensors, handle):
            self._prepare(runtime, tensors, handle)
        if alone and self._bundle is not None:
            # First: a KeyboardInterrupt may come as soon as they are announced.
            self._unsent, self.thread = runtime.engine, threading.get_ident()
            runtime.engine.add_pending(self._entries)
        else:
            runtime.engine.enqueue(self._entries)
        self.busy, self.handle, self._tensors = True, handle, tensors

    def wait(self) -> None:
        """Sleep until all are reduced. Raises the first error; nothing is in flight then."""
        try:
            self.exchange()
            self.handle.wait()
            self.adapter.finish_all(self._tensors)
        finally:
            if self.handle.poll():  # otherwise a signal has ended the wait
                self.release()

    def exchange(self) -> None:
        """Exchange tensors that were started `alone` with ranks that do so now, or send them.

        It may wait for these ranks for a moment, and never for the result.
        """
        if self._unsent is not None and self._bundle is not None:
            self._bundle.renew()
            engine, self._unsent = self._unsent, None
            engine.exchange(self._bundle)

    def send(self) -> None:
        """Let tensors that were not sent be reduced, though nobody will wait for them."""
        if self._unsent is not None:
            engine, self._unsent = self._unsent, None
            engine.send(self._entries)

    def release(self) -> None:
        """Drop the tensors, of which none is in flight any more."""
        for entry in self._entries:
            entry.release()
        self.busy, self._tensors = False, ()

    def _renew(self, tensors: Sequence[T], handle: SharedHandle) -> bool:
        """Give the entries these tensors; return False where a tensor has other properties."""
        entries, place, addresses = self._entries, self.adapter.place, set()
        if len(entries) != len(tensors):
            return False
        for index, (entry, tensor) in enumerate(zip(entries, tensors, strict=True)):
            if type(entry) is PlacedEntry:
                found = place(tensor, entry.spec)
                if found is None:
                    return False
                entry.renew(tensor, found, handle)
                addresses.add(found[0])
            else:  # not contiguous, or not on the host: its copies are made anew
                call = self._calls[index]
                if self.adapter.spec(tensor) != call.spec:
                    return False
                entries[index] = entry_of(call, self.adapter, tensor, tensor, handle)
                addresses.add(entries[index].target_address)
        if self.options.grouped and len(addresses) < len(tensors):
            check_targets(entries)
        return True

    def _prepare(self, runtime: Runtime, tensors: Sequence[T], handle: SharedHandle) -> None:
        adapter, options = self.adapter, self.options
        self._entries = []
        if options.grouped:
            name = f"grouped_{COLLECTIVE}.{self._names[0]}"
            specs = tuple(map(adapter.spec, tensors))
            requests = prepared_group(runtime, COLLECTIVE, name, specs, options)
            self._calls = [
                PreparedCall.of(spec, options, request)
                for spec, request in zip(specs, requests, strict=True)
            ]
        else:
            self._calls = [
                prepared(runtime, adapter, COLLECTIVE, f"{COLLECTIVE}.{name}", tensor, options)
                for name, tensor in zip(self._names, tensors, strict=True)
            ]
        entries = [
            entry_of(call, adapter, tensor, tensor, handle)
            for call, tensor in zip(self._calls, tensors, strict=True)
        ]
        if options.grouped:
            check_targets(entries)
        self._entries, self._bundle = entries, bundle_of(entries)


def start_bucket(
    runtime: Runtime,
    adapter: Adapter[T],
    names: Sequence[str],
    tensors: Sequence[T],
    options: CallOptions,
    *,
    alone: bool = False,
) -> PreparedBucket[Any]:
    """Start to reduce tensors in place, as `PreparedBucket.start`; return their bucket."""
    key = options.grouped, tuple(names)
    bucket = runtime.buckets.get(key)
    if bucket is None or bucket.busy or (bucket.options, bucket.adapter) != (options, adapter):
        if len(runtime.buckets) >= _MOST_BUCKETS:
            runtime.buckets.clear()
        bucket = PreparedBucket(adapter, key[1], options)
        runtime.buckets[key] = bucket
    found: PreparedBucket[Any] = bucket
    try:
        found.start(runtime, tensors, alone=alone)
    except BaseException:  # What was prepared may be half renewed.
        runtime.buckets.pop(key, None)
        found.send()  # The other ranks need what was announced.
        raise
    return found


def send_announced(runtime: Runtime) -> None:
    """Send what this thread has started `alone`, after a KeyboardInterrupt: others need it.

    No variable may hold the bucket yet.
    """
    for bucket in list(runtime.buckets.values()):
        if bucket.thread == threading.get_ident():
            bucket.send()


# The allreduce of gradients to new tensors, each under its own name or all as one group.


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
