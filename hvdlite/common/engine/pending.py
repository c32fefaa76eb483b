"""The tensors of one rank between enqueue and answer, by process set and name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.plain.entries import Entry, Key
from hvdlite.common.plain.messages import Request


class PendingTable:
    """Any thread adds entries; the engine thread pops them when they are answered, or fails them.

    The lock makes one order of adding and closing: an entry is either refused or failed, and never
    left in a table that nobody reads.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Guards the next three. Reentrant, as a signal handler may enqueue within any method.
        self._lock = threading.RLock()
        self._entries: dict[Key, Entry] = {}
        # Process set ids in which this rank has called join(), which has not returned.
        self._joined: set[int] = set()
        # Set by `close`: why nothing more can be added.
        self._closed: HorovodInternalError | None = None
        # The entries popped last, of the segment that runs: their handles may be incomplete. Used
        # by the engine thread alone.
        self._running: list[Entry] = []

    def add(self, entries: Sequence[Entry]) -> None:
        """Add all entries or none.

        Raises `ValueError` for a name that is pending already, and for anything in a process set
        in which this rank has joined; `HorovodInternalError` after `close`.
        """
        with self._lock:
            if self._closed is not None:
                raise HorovodInternalError(str(self._closed), rank=self._closed.rank)
            if self._joined:
                self._refuse_after_join(entries)
            pending = self._entries
            for count, entry in enumerate(entries):
                if pending.setdefault(entry.key, entry) is not entry:
                    for added in entries[:count]:
                        del pending[added.key]
                    raise ValueError(_duplicate(entry.request.name, self._rank))
            if entries and _is_join(entries[0].request):
                self._joined.add(entries[0].request.process_set_id)

    def _refuse_after_join(self, entries: Sequence[Entry]) -> None:
        """Raise `ValueError` if an entry belongs to a process set in which this rank has joined.

        The other ranks expect nothing more from a joined rank.
        """
        for entry in entries:
            if entry.request.process_set_id in self._joined:
                raise ValueError(
                    f"{entry.request.collective} '{entry.request.name}' on rank {self._rank}: this "
                    "rank has called join(), which has not returned: it takes part in nothing "
                    "until then. Call join after everything else"
                )

    def pop(self, keys: Iterable[Key]) -> list[Entry | None]:
        """Remove and return the entries of these keys; None where this rank has none."""
        with self._lock:
            pop = self._entries.pop
            entries = [pop(key, None) for key in keys]
            self._running = [entry for entry in entries if entry is not None]
            if self._joined and self._running and _is_join(self._running[0].request):
                self._joined.discard(self._running[0].request.process_set_id)
        return entries

    @property
    def joined(self) -> bool:
        """Whether this rank has called join() in some process set, which has not returned."""
        return bool(self._joined)

    def take(self, entry: Entry) -> bool:
        """Remove an entry; return whether it was there, and so has not failed."""
        with self._lock:
            return self._entries.pop(entry.key, None) is not None

    def find(self, process_set_id: int, name: str) -> Entry | None:
        """Return the entry of this name, which stays in the table, or None."""
        with self._lock:
            return self._entries.get((process_set_id, name))

    def pop_set(self, process_set_id: int) -> list[Entry]:
        """Remove and return all entries of a process set."""
        with self._lock:
            self._joined.discard(process_set_id)
            keys = [key for key in self._entries if key[0] == process_set_id]
            return [self._entries.pop(key) for key in keys]

    def close(self, error: HorovodInternalError) -> None:
        """Refuse all entries from now on, and fail those that are pending or running."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            failed, self._entries = list(self._entries.values()), {}
            self._joined.clear()
        running, self._running = self._running, []
        for entry in [*running, *failed]:
            if not entry.handle.poll():
                entry.handle.fail(error)


def _is_join(request: Request) -> bool:
    return SPECS[request.collective].effect is Effect.JOIN


def _duplicate(name: str, rank: int) -> str:
    return (
        f"'{name}' on rank {rank} has the same name as another tensor that is being processed: "
        "wait for it (synchronize), or give this one another name"
    )
