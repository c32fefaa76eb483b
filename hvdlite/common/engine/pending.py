"""The tensors of one rank between enqueue and answer, by process set and name."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from traceback import walk_stack

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.user_frames import call_of_user, is_in_gradients, is_of_user
from hvdlite.common.collectives.table import SPECS, Effect
from hvdlite.common.requests.entries import Entry, Key
from hvdlite.common.requests.handles import Handle
from hvdlite.common.requests.messages import Request
from hvdlite.common.transport.base import do_nothing


class PendingTable:
    """Any thread adds entries; the engine thread pops them when they are answered, or fails them.

    The lock makes one order of adding and closing: an entry is either refused or failed, and never
    left in a table that nobody reads.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # Guards all below. Reentrant, as a signal handler may enqueue within any method.
        self._lock = threading.RLock()
        self._entries: dict[Key, Entry] = {}
        # Those of them that `hold` keeps from failing.
        self._held: dict[Key, Entry] = {}
        # Process set ids in which this rank has called join(), which has not returned.
        self._joined: set[int] = set()
        # Set by `close`: why nothing more can be added.
        self._closed: HorovodInternalError | None = None
        # The entries popped last, of the segment that runs: their handles may be incomplete.
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
            try:
                for entry in entries:
                    if pending.setdefault(entry.key, entry) is not entry:
                        raise ValueError(_duplicate(entry.request.name, self._rank))
            except BaseException:  # Also for a KeyboardInterrupt.
                for entry in entries:
                    if pending.get(entry.key) is entry:
                        del pending[entry.key]
                raise
            if entries and not entries[0].size_bytes and _is_join(entries[0].request):
                self._joined.add(entries[0].request.process_set_id)

    def _refuse_after_join(self, entries: Sequence[Entry]) -> None:
        """Raise `ValueError` if an entry belongs to a process set in which this rank has joined.

        The other ranks expect nothing more from a joined rank.
        """
        for entry in entries:
            if SPECS[entry.request.collective].effect is Effect.RELEASE_SET:
                continue
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
            if self._held:  # An answer to other ranks, such as that one has departed.
                for entry in self._running:
                    self._held.pop(entry.key, None)
            if self._joined and self._running and _is_join(self._running[0].request):
                self._joined.discard(self._running[0].request.process_set_id)
        return entries

    def ran(self, *, launched: bool) -> None:
        """Forget the entries popped last if they were launched: the watch over a device ends them.

        Others have ended.
        """
        if launched:
            with self._lock:
                self._running = []

    @property
    def joined(self) -> bool:
        """Whether this rank has called join() in some process set, which has not returned."""
        return bool(self._joined)

    def hold(self, entries: Sequence[Entry]) -> bool:
        """Keep entries from failing until `let_go`; False if one of them has failed already.

        Their data are being exchanged without the engine. Once other ranks have the result, this
        rank must have it too, though its engine may hear of a lost rank before the thread goes on.
        """
        with self._lock:
            find = self._entries.get
            for entry in entries:
                if find(entry.key) is not entry:
                    return False
            self._held.update((entry.key, entry) for entry in entries)
            if self._running:  # Some ran last, and are on their way again, for the next step.
                again = set(entries)
                running = [each for each in self._running if each not in again]
                self._running = [each for each in running if not each.handle.poll()]
            return True

    def let_go(
        self, entries: Sequence[Entry], ended: list[Entry], *, exchanged: bool
    ) -> HorovodInternalError | None:
        """End `hold`; add to `ended` those that have left the table; return why they fail, if so.

        Those whose data were not exchanged are pending again, or fail if `close` was called. If a
        KeyboardInterrupt comes meanwhile, call it again with the same list.
        """
        with self._lock:
            error = None if exchanged else self._closed
            for entry in entries:
                # Others were answered meanwhile, or their process set was removed.
                if self._held.get(entry.key) is entry:
                    if exchanged or error is not None:
                        ended.append(entry)
                        self._entries.pop(entry.key, None)
                    del self._held[entry.key]
        return error

    def find(self, process_set_id: int, name: str) -> Entry | None:
        """Return the entry of this name, which stays in the table, or None."""
        with self._lock:
            return self._entries.get((process_set_id, name))

    def has(self, entry: Entry) -> bool:
        """Return whether an entry is neither complete nor failed."""
        return self.find(*entry.key) is entry

    def outstanding(self) -> list[tuple[str, float]]:
        """Return the tensors that are not complete, the oldest first, and when they were enqueued.

        The time is 0 where nobody observed the engine then.
        """
        with self._lock:
            entries = {*self._entries.values(), *self._running}
        found = [each for each in entries if not each.handle.poll()]
        found.sort(key=lambda entry: entry.enqueued)
        return [(entry.request.name, entry.enqueued) for entry in found]

    def waits(self) -> list[tuple[str, str, int]]:
        """Return the tensors for which threads of the user wait without a limit, and where.

        The number is 1 for a thread that exchanges gradients. Nothing is returned where one of
        these threads does anything else, so that it could submit more.
        """
        with self._lock:
            names = {id(entry.handle): entry.request.name for entry in self._entries.values()}
        waits = []
        for thread, frame in sys._current_frames().items():
            frames = [each for each, _ in walk_stack(frame)]
            users = any(is_of_user(each.f_code.co_filename) for each in frames)
            if not users and thread != threading.main_thread().ident:
                continue
            handle = Handle.awaited_in(frames)
            if id(handle) not in names:
                return []
            in_gradients = int(is_in_gradients(frames))
            waits.append((names[id(handle)], call_of_user(frames), in_gradients))
        return waits

    def pop_set(self, process_set_id: int) -> list[Entry]:
        with self._lock:
            self._joined.discard(process_set_id)
            keys = [key for key in self._entries if key[0] == process_set_id]
            for key in keys:
                self._held.pop(key, None)
            return [self._entries.pop(key) for key in keys]

    def close(self, error: HorovodInternalError, end_work: Callable[[], None] = do_nothing) -> None:
        """Refuse all entries from now on; fail those that are pending and not held, or running.

        `end_work` is called before those that are running fail, since their owners free their
        memory then: it ends what a device does with it.
        """
        with self._lock:
            if self._closed is None:
                self._closed = error
            failed = [entry for key, entry in self._entries.items() if key not in self._held]
            self._entries = {}
            self._joined.clear()
            running, self._running = self._running, []
        among = set(running)
        _fail((entry for entry in failed if entry not in among), error)
        try:
            end_work()
        finally:
            _fail(running, error)


def _fail(entries: Iterable[Entry], error: HorovodInternalError) -> None:
    for entry in entries:
        if not entry.handle.poll():
            entry.handle.fail(error)


def _is_join(request: Request) -> bool:
    return SPECS[request.collective].effect is Effect.JOIN


def _duplicate(name: str, rank: int) -> str:
    return (
        f"'{name}' on rank {rank} has the same name as another tensor that is being processed: "
        "wait for it (synchronize), or give this one another name"
    )
