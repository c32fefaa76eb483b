"""join and barrier: the collectives without a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from hvdlite.common.api.call_checks import members_of
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import Request
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import for_collective

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
    ) -> None:
        """Enqueue it; `waits` says that the calling thread calls `wait` next."""
        self._runtime = runtime or for_collective()
        self._process_set = process_set
        self._joins = SPECS[collective].effect is Effect.JOIN
        members_of(self._runtime, collective, process_set)
        entry = Entry(Request(process_set.process_set_id or 0, self._name(collective), collective))
        self._runtime.engine.enqueue([entry], waits=waits)
        self.handle = entry.handle

    def _name(self, collective: str) -> str:
        """Return another name for each call, as several threads may wait, or one gave up waiting.

        The calls are counted apart from those with tensors, with which another thread may be busy.
        A rank joins once.
        """
        if self._joins:
            return f"{collective}.noname"
        eras = _numbers.setdefault(self._runtime, {})
        numbers = eras.setdefault(self._runtime.era(self._process_set), itertools.count())
        return f"{collective}.noname.{next(numbers)}"

    def wait(self) -> int:
        """Sleep until all ranks have come; return the rank that joined last, where it is a join."""
        last = int(self.handle.wait() or 0)
        if self._joins:  # Ranks have made different calls: see [Note: eras and join] in runtime.py.
            _numbers.get(self._runtime, {}).pop(self._runtime.era(self._process_set), None)
            self._runtime.restart(self._process_set)
        return last
