"""Collectives of compiled programs: registered when a program is compiled, started when it runs.

    XLA's threads                   the thread "hvdlite-jax"         the engine
    hvdlite_start -> queue          hvdlite_next -> start            runs it
    hvdlite_take holds no thread, and is ended by                    Handle.on_end -> hvdlite_end

XLA's threads never wait for the GIL. The engine reads and writes the memory of the collective.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from hvdlite.common.api.options import CallOptions
from hvdlite.common.gradients.graph_buckets import (
    READ,
    READ_AND_WRITE,
    GraphBucket,
    array_at,
    when_all_have_ended,
)
from hvdlite.common.runtime.current import finder, for_collective, use
from hvdlite.common.runtime.process_sets import ProcessSet, global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.jax.calls import Call, Kind
from hvdlite.jax.native.library import Library, load
from hvdlite.jax.starting import Started, start_now


@dataclass
class Registered:
    """A collective of a program that was compiled: it can be started any number of times."""

    call: Call
    inputs: Sequence[Kind]
    results: Sequence[Kind]
    # Finds the runtime of the rank whose thread has compiled the program, in any thread.
    runtime: Callable[[], Runtime] = field(default_factory=finder)
    alone = False
    _bucket: GraphBucket | None = field(default=None, init=False)

    @property
    def names(self) -> Sequence[str]:
        """See `BucketCall`."""
        return self.call.names or (self.call.name or "",)

    @property
    def options(self) -> CallOptions:
        """See `BucketCall`."""
        return self.call.options

    @property
    def dtypes(self) -> list[np.dtype[Any]]:
        """See `BucketCall`."""
        return [kind.dtype for kind in self.inputs]

    @cached_property
    def owner(self) -> int | None:
        """What tells ranks apart that are threads of one process; None for that of the process."""
        return None if self.runtime is for_collective else id(self.runtime())

    @cached_property
    def number(self) -> int:
        """A number that no other collective has: the same wherever the same program is compiled."""
        options = self.options
        about = (
            self.call.collective, self.call.name, self.call.names, self.inputs, self.results,
            _number_of(options.process_set), options._replace(process_set=None),  # type: ignore[arg-type]
            None if self.call.exchange is None else id(self.call.exchange), self.owner,
        )  # fmt: skip
        digest = hashlib.blake2b(repr(about).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def start(self, addresses: Sequence[int]) -> Started:
        """Start it on the memory of a program. Raises as the engine does."""
        with use(self.runtime()):
            if self.call.names and self.call.exchange is None:
                if self._bucket is None:
                    self._bucket = GraphBucket(self)
                    self._shapes = [
                        n for each in self.inputs for n in (len(each.shape), *each.shape)
                    ]
                execution = self._bucket.start(self._shapes, addresses, is_last=False)
                return Started([execution.handle], release=execution.release)
            access = READ_AND_WRITE if self.call.keeps_shape else READ
            inputs = [
                array_at(address, kind.shape, kind.dtype, access)
                for address, kind in zip(addresses, self.inputs, strict=False)
            ]
            results = inputs
            if not self.call.keeps_shape:
                places = zip(addresses[len(inputs) :], self.results, strict=True)
                results = [
                    array_at(address, kind.shape, kind.dtype, READ_AND_WRITE)
                    for address, kind in places
                ]
            return start_now(self.call, inputs, results)


_registered: dict[int, Registered] = {}


def register(call: Call, inputs: Sequence[Kind], results: Sequence[Kind]) -> int:
    """Return the number by which a compiled program names this collective."""
    registered = Registered(call, inputs, results)
    number = registered.number
    _registered.setdefault(number, registered)
    return number


_sets: list[ProcessSet] = []  # all that programs have named, but that of all ranks
_sets_lock = threading.Lock()


def _number_of(process_set: ProcessSet) -> int:
    """Return a number that no other set of this process has: ids are given again after a removal.

    It is the same in each run that names sets in the same order, as programs that are kept on disk
    have it.
    """
    if process_set is global_process_set:
        return 0
    with _sets_lock:
        for number, known in enumerate(_sets, 1):
            if known is process_set:
                return number
        _sets.append(process_set)
        return len(_sets)


Key = tuple[int | None, Any, str]
_IN_ORDER = " in order"  # No name of a collective: the key of those that keep their order.


class _Execution(NamedTuple):
    """One execution of a collective: where its memory is, and what `hvdlite_end` is told of it."""

    registered: Registered
    addresses: Sequence[int]
    pointer: int

    @property
    def keys(self) -> list[Key]:
        """What nothing else in flight may have: its names, in its process set, on its rank."""
        number, owner = self.registered.options.process_set.process_set_id, self.registered.owner
        return [(owner, number, name) for name in self.registered.names]


class _Executions:
    """What the programs of this process have started, and the thread that starts it in the engine.

    The engine takes one tensor of a name at a time, and a program may have several: a function
    twice, or two optimizers for parameters of the same paths. The later one waits for the earlier.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._lock = threading.Lock()  # guards what is below
        self._names: set[Key] = set()  # of what is in flight
        self._waiting: list[_Execution] = []

    def serve(self) -> None:
        """Start for ever what programs have put into the queue."""
        while True:
            record = self._library.next()
            position = 0
            while position < len(record):
                pointer, number, count = record[position : position + 3]
                end = position + 3 + count
                self._take_up(pointer, number, record[position + 3 : end])
                position = end

    def _take_up(self, pointer: int, number: int, addresses: Sequence[int]) -> None:
        registered = _registered.get(number)
        if registered is None:
            self._library.end(pointer, b"this process has not compiled the program it is of")
            return
        with self._lock:
            self._waiting.append(_Execution(registered, addresses, pointer))
            free = self._free()
        for execution in free:
            self._start(execution)

    def _free(self) -> list[_Execution]:
        """Return what need not wait any more; the caller holds the lock, and starts it.

        Collectives that are named by their place begin in one order on all ranks: none of them
        overtakes another one.
        """
        free, waiting, earlier = [], [], set(self._names)
        for execution in self._waiting:
            names = execution.keys
            if execution.registered.options.by_place:
                names = [*names, (*names[0][:2], _IN_ORDER)]
            if earlier.isdisjoint(names):
                free.append(execution)
                self._names.update(execution.keys)
                earlier.update(execution.keys)
            else:
                waiting.append(execution)
                earlier.update(names)
        self._waiting = waiting
        return free

    def _start(self, execution: _Execution) -> None:
        try:
            started = execution.registered.start(execution.addresses)
        except Exception as error:
            self._end(execution, error)
            return
        when_all_have_ended(started.handles, lambda: self._end(execution, started.close()))

    def _end(self, execution: _Execution, error: Exception | None) -> None:
        text = (
            None
            if error is None
            else f"{type(error).__name__}: {error}".encode(errors="backslashreplace")
        )
        self._library.end(execution.pointer, text)
        with self._lock:
            self._names.difference_update(execution.keys)
            free = self._free()
        for following in free:
            # In a thread of its own, for this one may be the engine's.
            thread = threading.Thread(target=self._start, args=(following,), daemon=True)
            try:
                thread.start()
            except RuntimeError:  # No thread starts at the exit of the process.
                self._start(following)


_loading = threading.Lock()  # Several threads may compile programs.


def served_library() -> Library | None:
    """Return the compiled functions, with a thread that serves them; None without any."""
    with _loading:
        return _load_and_serve()


@cache
def _load_and_serve() -> Library | None:
    library = load()
    if library is not None:
        executions = _Executions(library)
        threading.Thread(target=executions.serve, name="hvdlite-jax", daemon=True).start()
        library.serve()
    return library


def forget_all() -> None:
    """Forget the programs that have been compiled, which are over, and what they have not taken.

    Ranks that are threads of one process forget nothing: others have programs that run.
    """
    if finder() is not for_collective:
        return
    _registered.clear()
    if _load_and_serve.cache_info().currsize and (library := served_library()) is not None:
        library.forget()
