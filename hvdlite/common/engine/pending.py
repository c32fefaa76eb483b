"""The tensors of one rank between enqueue and answer, by process set and name."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.plain.entries import Entry
from hvdlite.common.plain.messages import Request

Key = tuple[int, str]  # process set, name


class PendingTable:
    """Any thread adds entries; the engine thread takes them out, or fails them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Guards the next three. Reentrant, as a signal handler may enqueue within any of the
        # methods.
        self._lock = threading.RLock()
        self._entries: dict[Key, Entry] = {}
        self._joined: set[int] = set()  # process sets in which this rank waits for a join to end
        self._closed: HorovodInternalError | None = None
        self._running: list[Entry] = []  # taken last: their handles may be open. Engine thread

    def add(self, entries: Sequence[Entry]) -> None:
        """Add all or none.

        Raises `ValueError` for a name that is pending already, and for anything in a process set
        in which this rank has joined; `HorovodInternalError` when the engine has ended.
        """
        with self._lock:
            if self._closed is not None:
                raise HorovodInternalError(str(self._closed), rank=self._closed.rank)
            if self._joined:
                self._refuse_after_join(entries)
            for count, entry in enumerate(entries):
                key = _key(entry.request)
                if self._entries.setdefault(key, entry) is not entry:
                    for added in entries[:count]:
                        del self._entries[_key(added.request)]
                    raise ValueError(_duplicate(entry.request.name, self._rank))
            if entries and _is_join(entries[0].request):
                self._joined.add(entries[0].request.process_set_id)

    def _refuse_after_join(self, entries: Sequence[Entry]) -> None:
        """The others count on nothing more from a rank that has joined."""
        for entry in entries:
            if entry.request.process_set_id in self._joined:
                raise ValueError(
                    f"{entry.request.collective} '{entry.request.name}' on rank {self._rank}: this "
                    "rank has called join(), which has not returned: it takes part in nothing "
                    "until then. Call join after everything else"
                )

    def pop(self, requests: Iterable[Request]) -> list[Entry | None]:
        """Remove the entries that are answered now; None for what this rank does not have."""
        with self._lock:
            entries = [self._entries.pop(_key(request), None) for request in requests]
            self._running = [entry for entry in entries if entry is not None]
            if self._joined and self._running and _is_join(self._running[0].request):
                self._joined.discard(self._running[0].request.process_set_id)
        return entries

    def find(self, process_set_id: int, name: str) -> Entry | None:
        """The entry of this name, which stays."""
        with self._lock:
            return self._entries.get((process_set_id, name))

    def pop_set(self, process_set_id: int) -> list[Entry]:
        """Remove all entries of a process set."""
        with self._lock:
            self._joined.discard(process_set_id)
            keys = [key for key in self._entries if key[0] == process_set_id]
            return [self._entries.pop(key) for key in keys]

    def close(self, error: HorovodInternalError) -> None:
        """Refuse everything from now on, and fail what is pending or was taken last."""
        with self._lock:
            if self._closed is None:
                self._closed = error
            failed, self._entries = list(self._entries.values()), {}
            self._joined.clear()
        running, self._running = self._running, []
        for entry in [*running, *failed]:
            if not entry.handle.poll():
                entry.handle.fail(error)


def _key(request: Request) -> Key:
    return request.process_set_id, request.name


def _is_join(request: Request) -> bool:
    return SPECS[request.collective].effect is Effect.JOIN


def _duplicate(name: str, rank: int) -> str:
    return (
        f"'{name}' on rank {rank} has the same name as another tensor that is being processed: "
        "wait for it (synchronize), or give this one another name"
    )
