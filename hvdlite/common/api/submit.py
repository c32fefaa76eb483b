"""A collective from the call to its result, for the tensors of any framework.

`submit` checks what one rank can check alone, and enqueues; nothing is sent for a call that fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

from hvdlite.common.api.call_checks import check_target, check_targets, members_of, splits_of
from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_calls import prepared, prepared_group, remember
from hvdlite.common.api.tensor_entries import TensorEntry, entry_of
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.common.runtime.current import for_collective
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.tensors.adapter import Adapter, TensorSpec

T = TypeVar("T")


def as_list(operation: Operation[T], results: list[T]) -> Any:
    """Return the results as they are."""
    return results


@dataclass(slots=True)
class Operation(Generic[T]):
    """The operation behind a user's handle: one tensor, or a group."""

    entries: Sequence[TensorEntry[T]]
    shape_result: Callable[[Operation[T], list[T]], Any] = as_list

    def poll(self) -> bool:
        """Return whether all entries have ended, also on their device."""
        return all(entry.handle.is_computed() for entry in self.entries)

    def wait(self) -> Any:
        """Sleep until all entries have ended; return the result, or raise the first error."""
        if len(self.entries) == 1:
            return self.shape_result(self, [self.entries[0].wait_for_result()])
        return self.shape_result(self, self.wait_for_tensors())

    def wait_for_tensors(self) -> list[T]:
        """Sleep until all entries have ended; return the tensors, or raise the first error."""
        results: list[T] = []
        error: HorovodInternalError | None = None
        for entry in self.entries:
            try:
                results.append(entry.wait_for_result())
            except HorovodInternalError as failure:
                error = error or failure
        if error is not None:
            raise error
        return results


def start(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str | None,
    tensors: Sequence[T],
    options: CallOptions,
    targets: Sequence[T] | None = None,
    *,
    waits: bool = False,
) -> list[TensorEntry[T]]:
    """Enqueue as `submit`, under the user's `name`, or the next number of the process set."""
    label = f"grouped_{collective}" if options.grouped else collective
    if name is None:
        with runtime.named(name, options.process_set) as known:
            label = f"{label}.{known}"
            return submit(
                runtime, adapter, collective, label, tensors, options, targets, waits=waits
            )
    label = name if options.by_place else f"{label}.{name}"
    return submit(runtime, adapter, collective, label, tensors, options, targets, waits=waits)


def submit(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensors: Sequence[T],
    options: CallOptions,
    targets: Sequence[T] | None = None,
    *,
    waits: bool = False,
) -> list[TensorEntry[T]]:
    """Enqueue one collective on one tensor or on a group; never waits.

    `targets` are the tensors to write to (in place: the inputs). `waits`: see `Engine.enqueue`.
    Raises `ValueError` for what this rank can see to be wrong, `HorovodInternalError` when the
    engine has ended.
    """
    if not options.grouped:
        target = None if targets is None else targets[0]
        entries = [_entry(runtime, adapter, collective, name, tensors[0], options, target)]
        runtime.engine.enqueue(entries, waits=waits)
        return entries
    specs = tuple(adapter.spec(tensor) for tensor in tensors)
    remembered = runtime.requests.get(name)
    requests = prepared_group(runtime, collective, name, specs, options)
    for spec, tensor, target in zip(specs, tensors, targets or (), strict=False):
        _check_target(runtime, adapter, collective, name, spec, tensor, target, options)
    entries = [
        TensorEntry(request, adapter, tensor, None if targets is None else targets[index])
        for index, (request, tensor) in enumerate(zip(requests, tensors, strict=True))
    ]
    if targets is not None:
        is_new = runtime.requests.get(name) is not remembered
        if is_new or len(set(map(id, targets))) < len(targets):
            runtime.requests.pop(name, None)  # the next call is checked again if this one fails
            check_targets(entries)
            remember(runtime, name, (specs, options, requests))
    runtime.engine.enqueue(entries)
    return entries


def submit_each(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    names: Sequence[str],
    tensors: Sequence[T],
    options: CallOptions,
) -> list[TensorEntry[T]]:
    """Enqueue one collective on each tensor, under its name, in one call; see `submit`."""
    entries = [
        _entry(runtime, adapter, collective, f"{collective}.{name}", tensor, options, None)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    runtime.engine.enqueue(entries)
    return entries


def _entry(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    tensor: T,
    options: CallOptions,
    target: T | None,
) -> TensorEntry[T]:
    """Return the entry of one tensor, whose splits may be others in each call.

    Raises `ValueError`.
    """
    same = options if options.splits is None else options._replace(splits=None)
    call = prepared(runtime, adapter, collective, name, tensor, same)
    splits: tuple[int, ...] | None = None
    if SPECS[collective].splits:
        members = members_of(runtime, collective, options.process_set)
        splits = splits_of(adapter, name, call.spec, options, len(members))
    _check_target(runtime, adapter, collective, name, call.spec, tensor, target, options)
    if splits is not None:
        return TensorEntry(call.request, adapter, tensor, target, splits)
    return entry_of(call, adapter, tensor, target)


def _check_target(
    runtime: Runtime,
    adapter: Adapter[T],
    collective: str,
    name: str,
    spec: TensorSpec,
    tensor: T,
    target: T | None,
    options: CallOptions,
) -> None:
    """Raise `ValueError` for a target that is no place for the result, as `check_target`."""
    if target is not None and target is not tensor:
        members = members_of(runtime, collective, options.process_set)
        place = len(members), members.index(runtime.rank)
        check_target(collective, name, spec, adapter.spec(target), *place)


# join and barrier: the collectives without a tensor.


# The calls of each era, in which all ranks of a process set make the same calls. Without a lock,
# which a signal handler that calls barrier() could wait for in vain: every access is atomic.
_numbers: WeakKeyDictionary[Runtime, dict[object, Iterator[int]]] = WeakKeyDictionary()


class Signal:
    """A collective without a tensor, from its start on."""

    def __init__(
        self,
        collective: str,
        process_set: ProcessSet,
        runtime: Runtime | None = None,
        *,
        waits: bool = False,
        name: str | None = None,
        settings: str = "",
    ) -> None:
        """Enqueue it; `waits` says that the calling thread calls `wait` next.

        A `name`, with what ranks must have set alike, is that of a place; see `CallOptions`.
        """
        self._runtime = runtime or for_collective()
        self._process_set = process_set
        self._joins = SPECS[collective].effect is Effect.JOIN
        members_of(self._runtime, collective, process_set)
        if self._joins:  # A rank joins once.
            name = f"{collective}.noname"
        elif name is None:
            # Another name for each call, as several threads may wait, or one gave up waiting. They
            # are counted apart from those with tensors, with which another thread may be busy.
            eras = _numbers.setdefault(self._runtime, {})
            numbers = eras.setdefault(self._runtime.era(process_set), itertools.count())
            name = f"{collective}.noname.{next(numbers)}"
        number = process_set.process_set_id or 0
        entry = Entry(Request(number, name, collective, settings=settings))
        self._runtime.engine.enqueue([entry], waits=waits)
        self.handle = entry.handle

    def wait(self) -> int:
        """Sleep until all ranks have come; return the rank that joined last, where it is a join."""
        last = int(self.handle.wait() or 0)
        if self._joins:  # Ranks have made different calls: see [Note: eras and join] in runtime.py.
            _numbers.get(self._runtime, {}).pop(self._runtime.era(self._process_set), None)
            self._runtime.restart(self._process_set)
        return last
