"""What torch waits for: one call of a collective, which may be several tensors for the engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import Work

from hvdlite.common.api.tensor_entries import TensorEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.handles import Handle
from hvdlite.common.transport.base import do_nothing
from hvdlite.torch.autograd import untraced
from hvdlite.torch.process_group.waiting import Abort, deadlines, future_of, waitable


class CollectiveWork(Work):
    """A call of a collective. Any thread may wait for it; the first one finishes it."""

    finish: Callable[[], None] = staticmethod(do_nothing)
    # Called when somebody has waited: see `GroupBase._keep`.
    let_go: Callable[[], object] = staticmethod(do_nothing)
    _finished = False
    source = -1  # Of a receive: the rank of the group that has sent, once it is known.

    def __init__(
        self,
        entries: Sequence[Entry],
        outputs: list[Any],
        timeout: timedelta,
        members: Sequence[int],
        finish: Callable[[], None] = do_nothing,
        *,
        writes: bool = True,
        abort: Abort | None = None,
    ) -> None:
        """Call `finish` once when all entries have ended without an error.

        By default the engine has written the results where they belong.
        `abort` is that of the group, by default one that nobody calls.
        Without `writes` the tensors are only read on this rank, and autograd may go on using them.
        """
        super().__init__()
        self.entries = entries
        self.outputs = outputs
        if finish is not do_nothing:
            self.finish = finish
        self.writes = writes
        self.timeout = timeout
        self.members = members  # Global ranks, for messages.
        self._abort = Abort() if abort is None else abort
        self._lock = threading.Lock()  # Guards `_finished`.

    @untraced
    def wait(self, timeout: timedelta | None = None) -> bool:
        """Sleep until the results are there; return True.

        `timeout` is at most how long, by default that of the process group; the collective goes on
        after it. Raises `HorovodInternalError` for a collective that failed, after `timeout`, and
        when the group has been aborted.
        """
        limit = timeout if timeout is not None and timeout > timedelta(0) else self.timeout
        began = time.monotonic()
        for entry in self.entries:
            handle = entry.handle
            if handle.poll():
                if handle.error is not None:  # Others may wait for ranks that disagree.
                    break
                continue
            queue = handle.queue
            if queue is not None:
                queue.attend(handle)
                if handle.poll():  # It was a short call.
                    continue
            until = began + limit.total_seconds()
            if not self._ended_within(handle, waitable(until - time.monotonic())):
                raise self._unfinished(entry, limit)
            if handle.error is not None:
                break
        self._end()
        return True

    def has_succeeded_by(self, until: float) -> bool:
        """Sleep until the results are there, at most until a time of `time.monotonic`.

        Return whether they are. Raises `HorovodInternalError` where the job fails.
        """
        for entry in self.entries:
            if not self._ended_within(entry.handle, waitable(until - time.monotonic())):
                return False
        error = self.exception()
        if isinstance(error, HorovodInternalError) and not error.job_goes_on:
            self.wait()
        if error is None:
            self._end()
        return error is None

    def _source_rank(self) -> int:
        """Return the rank of the group that has sent, after `wait` for a receive."""
        return self.source

    source_rank = _source_rank

    def _ended_within(self, handle: Handle, seconds: float) -> bool:
        """Sleep until the handle has ended, at most `seconds`; return whether it has.

        An abort wakes this thread, too.
        """
        gate = threading.Lock()
        gate.acquire()

        def wake() -> None:
            with suppress(RuntimeError):  # The other one has done it.
                gate.release()

        handle.on_end(wake)
        key = self._abort.add(wake)
        gate.acquire(timeout=seconds)
        self._abort.forget(key)
        return handle.poll()

    @untraced
    def synchronize(self) -> None:
        """Do as `wait` does without a limit of its own."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether `wait` would not sleep."""
        computed = all(entry.handle.is_computed() for entry in self.entries)
        return self._abort.is_called or computed

    def _pending(self) -> Entry | None:
        """Return the first entry that has not ended; None if all have."""
        return next((entry for entry in self.entries if not entry.handle.poll()), None)

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Return the error of the work; None if there is none so far."""
        for entry in self.entries:
            if entry.handle.error is not None:
                return entry.handle.error
        pending = self._pending()
        return self._aborted(pending) if pending and self._abort.is_called else None

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors, which have values after `wait`."""
        return self.outputs

    @untraced
    def get_future(self) -> Any:
        """Return a future of the list of output tensors; its callbacks may wait for collectives.

        It fails after the timeout of this work, as nobody who waits for it says a time, and when
        the group has been aborted.
        """
        devices = {each.device for each in self.outputs if not each.is_cpu}
        return future_of(self._result, self._call_at_end, sorted(devices, key=str))

    def _result(self) -> list[Any]:
        pending = self._pending()
        if pending is not None:
            raise self._unfinished(pending, self.timeout)
        self._end()
        return self.outputs

    def _call_at_end(self, job: Callable[[], None]) -> None:
        """Call `job` once, when the last entry has ended, the timeout is over, or by an abort."""
        lock, left, called = threading.Lock(), len(self.entries), threading.Lock()

        def call() -> None:
            if called.acquire(blocking=False):
                job()

        def one_less() -> None:
            nonlocal left
            with lock:
                left -= 1
                last = left == 0
            if last:
                deadlines.forget(deadline)
                self._abort.forget(key)
                call()

        if not self.entries:
            job()
            return
        deadline = deadlines.add(self.timeout.total_seconds(), call)
        key = self._abort.add(call)
        for entry in self.entries:
            entry.handle.on_end(one_less)

    def _end(self) -> None:
        """Tell torch of what was written; all entries have ended."""
        with self._lock:
            if self._finished:
                return
            for entry in self.entries:
                if self.writes and isinstance(entry, TensorEntry):
                    entry.wait_for_result()
                else:
                    entry.handle.wait()
            self.finish()
            self._finished = True
        self.let_go()

    def _unfinished(self, entry: Entry, limit: timedelta) -> HorovodInternalError:
        """Return why nobody waits for an entry any longer."""
        if self._abort.is_called:
            return self._aborted(entry)
        request = entry.request
        return HorovodInternalError(
            f"{request.collective} '{request.name}' was not complete after "
            f"{limit.total_seconds():g} s: one of the ranks {list(self.members)} has not made this "
            "call. Rank 0 logs which ones after HVDLITE_STALL_CHECK_TIME_SECONDS; a longer timeout "
            "can be given to wait(), init_process_group() and new_group()",
            job_goes_on=True,
        )

    def _aborted(self, entry: Entry) -> HorovodInternalError:
        return HorovodInternalError(
            f"{entry.request.collective} '{entry.request.name}' was aborted on this rank, by "
            "abort() of its process group, before all ranks had made this call. It may still run "
            "and write to its tensors when they do",
            job_goes_on=True,
        )
