"""Messages between two ranks: send, recv also from any rank, and monitored_barrier."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import timedelta

import torch

from hvdlite.common.api.tensor_entries import TensorEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.torch.process_group import checks
from hvdlite.torch.process_group.arguments import Tensors, as_list
from hvdlite.torch.process_group.base import GroupBase
from hvdlite.torch.process_group.calls import Caller
from hvdlite.torch.process_group.work import CollectiveWork

MONITORED = -1  # The tag of monitored_barrier, which no user gives.


class Peers(GroupBase):
    """Messages between two ranks of a group."""

    def __init__(self, caller: Caller, rank: int) -> None:
        super().__init__(caller, rank)
        # By tag; only of those tags that something was received with from any rank.
        self._receives: dict[int, _OrderedReceives] = {}

    def send(self, tensors: torch.Tensor | Tensors, dst: int, tag: int = 0) -> CollectiveWork:
        """Send tensors to rank `dst` of the group, which calls `recv`."""
        return self._message("send", as_list(tensors), (self._rank, dst, tag), dst)

    def recv(self, tensors: torch.Tensor | Tensors, src: int, tag: int = 0) -> CollectiveWork:
        """Receive tensors of as many elements from rank `src` of the group."""
        tensors, ordered = as_list(tensors), self._receives.get(tag)
        if ordered is None or ordered.is_idle:
            work = self._message("recv", tensors, (src, self._rank, tag), src)
        else:
            self._check_message("recv", tensors, src)
            receives = [_Receive(self._caller, tensor, src) for tensor in tensors]
            ordered.start(receives)
            work = self._received(receives)
        work.source = src
        return work

    def recv_anysource(self, tensors: torch.Tensor | Tensors, tag: int = 0) -> CollectiveWork:
        """Receive a tensor from the rank of the group that sends first: `source_rank` of the work.

        Receives of one tag are served in the order in which they were called, as by gloo: this one
        may get what a later `recv` from one rank was called for.
        """
        tensors = as_list(tensors)
        if len(tensors) != 1:
            raise ValueError(f"recv: {len(tensors)} tensors, and one comes from any rank")
        if self._size == 1:
            raise ValueError("recv: this rank is the only one of the group, and nobody can send")
        checks.readable("recv", tensors)
        self._caller.checked_runtime()
        receive = _Receive(self._caller, tensors[0])
        self._receives.setdefault(tag, _OrderedReceives(self._caller, self._rank, tag)).start(
            [receive]
        )
        return self._received([receive])

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait until all ranks of the group have called this; say which ones have not.

        Rank 0 of the group waits for the others for `timeout`, by default that of the group. Then
        it raises `HorovodInternalError`, which names the first rank that has not come, or with
        `wait_all_ranks` all of them; the ranks that have come raise, too.
        """
        limit = self._caller.timeout if timeout is None else timeout
        if self._rank:
            self._come(max(limit, timedelta(milliseconds=1)))
        else:
            self._await_all(limit, wait_all_ranks)

    def _come(self, limit: timedelta) -> None:
        """Tell rank 0 of the group that this one has come, and wait for its answer."""
        answer = torch.zeros(self._size, dtype=torch.uint8)
        try:
            self.send(torch.empty(1, dtype=torch.uint8), 0, MONITORED).wait(limit)
            self.recv(answer, 0, MONITORED).wait(limit)
            absent = answer.nonzero().flatten().tolist()
            if not absent:
                return
            why = f"rank 0 of the group has not seen {self._named(absent)}"
        except HorovodInternalError as error:
            if not error.job_goes_on:
                raise
            why = str(error)
        raise HorovodInternalError(
            f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while "
            "waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n"
            f"Original exception: {why}",
            job_goes_on=True,
        )

    def _await_all(self, limit: timedelta, wait_all_ranks: bool) -> None:
        """Wait for all other ranks, and tell those that have come who has not."""
        until = time.monotonic() + limit.total_seconds()
        others = range(1, self._size)
        works = {
            rank: self.recv(torch.empty(1, dtype=torch.uint8), rank, MONITORED) for rank in others
        }
        absent = [rank for rank, work in works.items() if not work.has_succeeded_by(until)]
        answer = torch.zeros(self._size, dtype=torch.uint8)
        answer[absent] = 1
        # Also to those who may come later: each call takes one answer.
        answers = [self.send(answer, rank, MONITORED) for rank in others]
        if absent:
            named = absent if wait_all_ranks else absent[:1]
            milliseconds = round(limit.total_seconds() * 1000)
            raise HorovodInternalError(
                f"[Rank 0]: Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to "
                f"pass monitoredBarrier in {milliseconds} ms\n"
                f"Original exception: Rank 0 timed out in monitoredBarrier after {milliseconds} "
                f"ms: {self._named(named)} did not call it",
                job_goes_on=True,
            )
        for each in answers:
            each.wait(limit)

    def _named(self, ranks: Sequence[int]) -> str:
        """Return ranks of the group by their numbers in the job."""
        members = ", ".join(str(self._caller.members[rank]) for rank in ranks)
        return f"{'ranks' if len(ranks) > 1 else 'rank'} {members} of the job"

    def _check_message(self, what: str, tensors: list[torch.Tensor], peer: int) -> None:
        checks.readable(what, tensors)
        checks.rank_in(what, peer, self._size)
        if peer == self._rank:
            raise ValueError(f"{what}: rank {peer} of the group is this rank itself: use copy_()")

    def _message(
        self,
        what: str,
        tensors: list[torch.Tensor],
        key: tuple[int, int, int],
        peer: int,
    ) -> CollectiveWork:
        self._check_message(what, tensors, peer)
        caller = self._caller
        sends = what == "send"
        entries = caller.message(key, tensors, caller.members[peer], sends)
        return self._work(entries, tensors, writes=not sends)

    def _received(self, receives: Sequence[_Receive]) -> CollectiveWork:
        def finish() -> None:
            for receive in receives:
                if isinstance(receive.message, TensorEntry):
                    receive.message.wait_for_result()
                work.source = receive.source

        work = self._work(receives, [each.tensor for each in receives], finish=finish)
        return work


class _Receive(Entry):
    """A receive that starts when the senders of those before it are known, and its own one."""

    def __init__(self, caller: Caller, tensor: torch.Tensor, source: int = -1) -> None:
        what = "recv from any rank" if source < 0 else f"recv from rank {source}"
        super().__init__(Request(GLOBAL_ID, caller.name(what), "point_to_point"))
        self.tensor = tensor
        self.source = source  # In the group; -1 until it is known.
        self.message: Entry | None = None  # What the engine has got.


class _OrderedReceives:
    """The receives of one tag on this rank, from the first one that is from any rank.

    What comes next from each rank is known only when all receives before have got their senders.
    """

    def __init__(self, caller: Caller, rank: int, tag: int) -> None:
        self._caller, self._tag, self._rank = caller, tag, rank
        self._lock = threading.RLock()  # Guards `_waiting`, and the numbers of messages.
        self._waiting: deque[_Receive] = deque()

    @property
    def is_idle(self) -> bool:
        """Whether the senders of all receives are known."""
        return not self._waiting

    def start(self, receives: Sequence[_Receive]) -> None:
        """Start receives after those that were started before; never waits."""
        with self._lock:
            is_first = self.is_idle
            self._waiting.extend(receives)
            if is_first:
                self._go_on()

    def _go_on(self) -> None:
        """Start all receives of which the sender is known, and ask for the next one."""
        while self._waiting:
            receive = self._waiting[0]
            if receive.source < 0:
                self._ask(receive)
                return
            self._receive(receive)
            self._waiting.popleft()

    def _ask(self, receive: _Receive) -> None:
        members = self._caller.members
        kinds = {
            members[source]: (source, self._rank, self._tag)
            for source in range(len(members))
            if source != self._rank
        }
        try:
            search = self._caller.find_sender(kinds, f"find_sender.{self._tag}")
        except Exception as error:  # The engine has ended.
            self._waiting.popleft()
            receive.handle.fail(error)
            self._go_on()
            return
        search.handle.on_end(lambda: self._found(receive, search))

    def _found(self, receive: _Receive, search: Entry) -> None:
        """Go on after the answer of the coordinator, mostly in the thread of the engine."""
        with self._lock:
            if search.handle.error is not None:
                self._waiting.popleft()
                receive.handle.fail(search.handle.error)
            else:
                (sender,) = search.response.first_dims
                receive.source = self._caller.members.index(sender)
            self._go_on()

    def _receive(self, receive: _Receive) -> None:
        kind = receive.source, self._rank, self._tag
        sender = self._caller.members[receive.source]
        try:
            (message,) = self._caller.start_message(kind, [receive.tensor], sender, sends=False)
        except Exception as error:  # Of a dtype without messages, or the engine has ended.
            receive.handle.fail(error)
            return
        receive.message = message
        message.handle.on_end(lambda: _pass_on(message, receive))


def _pass_on(message: Entry, receive: _Receive) -> None:
    error = message.handle.error
    if error is None:
        receive.handle.complete()
    else:
        receive.handle.fail(error)
