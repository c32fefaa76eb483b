"""What all methods of a process group share: its calls, and the works that they return."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.common.requests.entries import Entry
from hvdlite.common.transport.base import do_nothing
from hvdlite.torch.process_group.arguments import timeout_of
from hvdlite.torch.process_group.calls import Caller
from hvdlite.torch.process_group.work import CollectiveWork

# Older releases keep the C++ half of a work only, which has no methods of ours: the group keeps the
# other half until somebody has waited, and beyond so many the oldest that have ended.
_KEEPS_WORKS = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)
MOST_KEPT = 64


class GroupBase:
    """The state of a process group on one rank."""

    def __init__(self, caller: Caller, rank: int) -> None:
        self._caller = caller
        self._rank = rank
        self._size = len(caller.members)
        # The works since _start_coalescing for which nobody has waited; None outside of it. Torch
        # calls nothing when an exception leaves a coalescing, so these may be later works, too.
        self._coalesced: dict[int, CollectiveWork] | None = None
        self._kept: OrderedDict[int, CollectiveWork] = OrderedDict()

    def _work(
        self,
        entries: Sequence[Entry],
        outputs: list[Any],
        options: Any = None,
        timeout: Any = None,
        finish: Callable[[], None] = do_nothing,
        *,
        writes: bool = True,
    ) -> CollectiveWork:
        caller = self._caller
        limit = timeout_of(options, timeout, caller.timeout)
        work = CollectiveWork(
            entries, outputs, limit, caller.members, finish, writes=writes, abort=caller.abort
        )
        if _KEEPS_WORKS or self._coalesced is not None:
            self._keep(work)
        return work

    def _keep(self, work: CollectiveWork) -> None:
        """Keep a work until somebody has waited for it."""
        key, tables = id(work), [] if self._coalesced is None else [self._coalesced]
        if _KEEPS_WORKS:
            tables.append(self._kept)
        for table in tables:
            table[key] = work
        work.let_go = lambda: [table.pop(key, None) for table in tables]
        if len(self._kept) > MOST_KEPT:
            for old in list(self._kept.values())[:-MOST_KEPT]:
                if old.is_completed():
                    self._kept.pop(id(old), None)

    def _start_coalescing(self, device: torch.device) -> None:
        """Collect the works of the calls that follow."""
        self._coalesced = {}

    def _end_coalescing(self, device: torch.device) -> CollectiveWork:
        """Return one work for all calls since `_start_coalescing`."""
        works, self._coalesced = list((self._coalesced or {}).values()), None

        def finish() -> None:
            for work in works:
                work.wait()

        entries = [entry for work in works for entry in work.entries]
        outputs = [output for work in works for output in work.outputs]
        longest = max((work.timeout for work in works), default=None)
        return self._work(entries, outputs, timeout=longest, finish=finish, writes=False)
