"""The way from tensors and options of torch to entries of the engine.

Names are ``pg.<group>.<collective>.<counter>``: c10d has one order of calls for each group instead
of names. The group is part of the name, as two groups of the same ranks are one process set.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import lru_cache
from hashlib import sha1
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.prepared_calls import prepared_once
from hvdlite.common.api.process_group_calls import message_name, message_request
from hvdlite.common.api.tensor_entries import (
    PreparedCall,
    TensorEntry,
    entry_of_transfer,
)
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.entries import Entry, Series
from hvdlite.common.requests.messages import Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.common.runtime.current import find
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.torch.process_group.arguments import translate
from hvdlite.torch.process_group.checks import BACKEND
from hvdlite.torch.process_group.tensors import ADAPTER, FittedEntry, KnownCall, overlap
from hvdlite.torch.process_group.waiting import Abort

MOST_KNOWN = 1000  # calls of a group that are remembered
# How many groups of each name and members a runtime has had. The next one of a name, after
# destroy_process_group(), must not meet calls of the last one that are still pending somewhere.
_made: WeakKeyDictionary[Runtime, Counter[tuple[object, ...]]] = WeakKeyDictionary()


class Caller:
    """Makes the calls of one process group."""

    def __init__(
        self, runtime: Runtime, process_set: ProcessSet, members: Sequence[int], timeout: timedelta
    ) -> None:
        self.runtime = runtime
        self.process_set = process_set
        self.members = list(members)  # Global ranks, by rank of the group.
        self.timeout = timeout
        self.abort = Abort()
        # Its name, set by torch after it has been made; and the same in the names of tensors.
        self.torch_name = self.group = ""
        self._era = runtime.era(process_set)
        # How many calls of each kind this era has seen. It is not one number for all, as a thread
        # that writes a checkpoint may call other collectives than the training beside it.
        self._numbers: Counter[object] = Counter()
        self._is_checked = False
        # Checked calls by what is checked; only their names are new each time.
        self._known: dict[Any, KnownCall] = {}
        self._latest: dict[tuple[int, int, int], KnownCall] = {}  # Messages by their kind.
        self._signals: dict[str, Series] = {}  # Calls without a tensor.

    def be_called(self, group: str) -> None:
        """Take the name that torch gives.

        After destroy_process_group() torch begins with the same names, also for other members: how
        often a group was made is the same on its members only. With ``use_local_synchronization``
        it hashes the number of groups of each rank, too, which may differ among members.
        """
        self.torch_name = group
        if re.fullmatch("[0-9a-f]{40}", group):
            group = f"of_{_digest(self.members)}"
        made = _made.setdefault(self.runtime, Counter())
        key = group, *self.members
        made[key] += 1
        self.group = group if made[key] == 1 else f"{group}@{made[key]}"

    # -- options

    def reducing(self, op: Any) -> CallOptions:
        """Return the options of a reduction by an op of torch. Raises `ValueError`."""
        return _reducing(self.process_set, *translate(op))

    def rooted(self, root: int) -> CallOptions:
        """Return the options of a call with a root, which is a rank of the group."""
        return CallOptions(self.process_set, root_rank=self.members[root])

    def plain(self, splits: Sequence[int] | None = None) -> CallOptions:
        """Return the options of a call without further options."""
        return CallOptions(self.process_set, splits=splits)

    # -- calls

    def first_number(self, kind: object) -> int:
        """Return the number of the next call of a kind; `count` uses numbers up.

        A call that is refused on this rank is not counted, as others may not have made it. A join
        begins a new era, in which all ranks count from 0: see [Note: eras and join] in
        common/runtime/runtime.py.
        """
        era = self.runtime.era(self.process_set)
        if era is not self._era:
            self._era = era
            self._numbers.clear()
        return self._numbers[kind]

    def count(self, kind: object, calls: int) -> None:
        """Use up the numbers of calls that were made."""
        self._numbers[kind] += calls

    def name(self, kind: str) -> str:
        """Return the name of the calls of a kind, which their numbers follow."""
        return f"pg.{self.group}.{kind}"

    def _send_name(self, kind: tuple[int, int, int]) -> str:
        """Return the name of the messages of a kind: source, destination and tag.

        They belong to no process set, so groups of one name and different ranks must not meet.
        """
        whole = len(self.members) == self.runtime.topology.size
        ranks = "" if whole else f"of_{_digest(self.members)}."
        return self.name("{}send.{}.{}.{}".format(ranks, *kind))

    def enqueue(
        self,
        collective: str,
        tensors: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        options: CallOptions,
        kind: str = "",
        expected: Sequence[Sequence[int]] = (),
    ) -> list[Entry]:
        """Enqueue a collective for each of `tensors`, to be written to `targets`.

        Raises `ValueError` before anything is sent. `kind` stands in the name.
        """
        runtime = self.checked_runtime()
        kind = kind or collective
        number = self.first_number(kind)
        entries = []
        for index, (tensor, target) in enumerate(zip(tensors, targets, strict=True)):
            rows = expected[index] if expected else ()
            known, splits = self._find(collective, kind, tensor, options)
            entries.append(self._entry(known, splits, number + index, tensor, target, rows))
        runtime.engine.enqueue(entries)
        self.count(kind, len(entries))
        return entries

    def gather(
        self, parts: Mapping[str, torch.Tensor], options: CallOptions
    ) -> list[TensorEntry[torch.Tensor]]:
        """Enqueue allgathers, by their kinds, whose results have the rows of all ranks.

        All have the number of the first one, which may be a kind that other calls have as well.
        """
        runtime = self.checked_runtime()
        first = next(iter(parts))
        number = self.first_number(first)
        entries = []
        for kind, tensor in parts.items():
            known, _ = self._find("allgather", kind, tensor, options)
            entry = TensorEntry(known.series.numbered(number), ADAPTER, tensor, None)
            entry.series, entry.number = known.series, number
            entries.append(entry)
        runtime.engine.enqueue(entries)
        self.count(first, 1)
        return entries

    def message(
        self, kind: tuple[int, int, int], tensors: Sequence[torch.Tensor], peer: int, sends: bool
    ) -> list[Entry]:
        """Enqueue a message to or from a global rank for each tensor; return the entries.

        Messages of one kind, which are source, destination and tag, keep their order. Raises
        `ValueError` before anything is sent.
        """
        self.checked_runtime()
        return self.start_message(kind, tensors, peer, sends)

    def start_message(
        self, kind: tuple[int, int, int], tensors: Sequence[torch.Tensor], peer: int, sends: bool
    ) -> list[Entry]:
        """Do as `message` does after it has been checked; any thread, never waits."""
        runtime = self.runtime
        number = self.first_number(kind)
        entries = [
            self._message(kind, number + index, tensor, peer, sends)
            for index, tensor in enumerate(tensors)
        ]
        runtime.engine.enqueue(entries)
        self.count(kind, len(entries))
        return entries

    def find_sender(self, kinds: Mapping[int, tuple[int, int, int]], what: str) -> Entry:
        """Ask which rank has sent first; its response has the global rank in `first_dims`.

        `kinds` are those of the messages to this rank, by the global rank that sends. Any thread,
        never waits. `what` names the search.
        """
        rank = self.runtime.rank
        messages = [
            f"{message_name(sender, rank, self._send_name(kind))}.{self.first_number(kind)}"
            for sender, kind in kinds.items()
        ]
        number = self.first_number(what)
        self.count(what, 1)
        entry = Entry(
            Request(
                GLOBAL_ID,
                f"{self.name(what)}.{rank}.{number}",
                "find_sender",
                shape=tuple(kinds),
                settings="\n".join(messages),
                parties=(rank,),
            )
        )
        self.runtime.engine.enqueue([entry])
        return entry

    def _message(
        self, kind: tuple[int, int, int], number: int, tensor: torch.Tensor, peer: int, sends: bool
    ) -> Entry:
        latest = self._latest.get(kind)
        if latest is not None:
            place = ADAPTER.place(tensor, latest.call.spec)
            if place is not None:
                return latest.placed(number, tensor, place)
        spec = ADAPTER.spec(tensor)
        key = kind, spec
        known = self._known.get(key)
        if known is None:
            name = self._send_name(kind)
            request = message_request(self.runtime, spec, peer, name, sends=sends)
            known = self._keep(key, PreparedCall.of(spec, None, request))
        self._latest[kind] = known
        place = ADAPTER.place(tensor, spec)
        if place is not None:
            return known.placed(number, tensor, place)
        request = known.series.numbered(number)
        entry = entry_of_transfer(request, ADAPTER, tensor, spec, sends=sends)
        entry.series, entry.number = known.series, number
        return entry

    def _entry(
        self,
        known: KnownCall,
        splits: tuple[int, ...],
        number: int,
        tensor: torch.Tensor,
        target: torch.Tensor,
        expected: Sequence[int],
    ) -> Entry:
        if target is tensor:
            place = ADAPTER.place(tensor, known.call.spec)
            if place is not None:
                return known.placed(number, tensor, place)
        elif overlap(tensor, target):
            # It may lie where the target gets its values anyway: a part of each rank in a row.
            own = target.data_ptr() + self.members.index(self.runtime.rank) * tensor.nbytes
            in_a_row = target.nbytes == tensor.nbytes * len(self.members)
            if not in_a_row or tensor.data_ptr() != own:
                tensor = tensor.clone()  # Others read it while this rank writes.
        request = known.series.numbered(number)
        if expected:
            entry: Entry = FittedEntry(request, tensor, target, splits, expected)
        else:
            entry = TensorEntry(request, ADAPTER, tensor, target, splits)
        entry.series, entry.number = known.series, number
        return entry

    def _find(
        self, collective: str, kind: str, tensor: torch.Tensor, options: CallOptions
    ) -> tuple[KnownCall, tuple[int, ...]]:
        """Return the call for a tensor, which is checked once for all like it, and its splits."""
        key: object = kind, tensor.dtype, tensor.shape, tensor.device, tensor.layout, options
        known = self._known.get(key) if options.splits is None else None
        if known is not None:
            return known, ()
        name = self.name(kind)
        call, splits = prepared_once(self.runtime, ADAPTER, collective, name, tensor, options)
        if options.splits is not None:
            key = call.request
            known = self._known.get(key)
        return known or self._keep(key, call), splits

    def _keep(self, key: Any, call: PreparedCall) -> KnownCall:
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
            self._latest.clear()
        known = self._known[key] = KnownCall(call, Series(call.request))
        return known

    def signal(self, collective: str) -> list[Entry]:
        """Enqueue a collective without a tensor."""
        runtime = self.checked_runtime()
        known = self._signals.get(collective)
        if known is None:
            set_id = self.process_set.process_set_id or 0
            known = Series(Request(set_id, self.name(collective), collective))
            self._signals[collective] = known
        number = self.first_number(collective)
        entry = Entry(known.numbered(number))
        entry.series, entry.number = known, number
        runtime.engine.enqueue([entry])
        self.count(collective, 1)
        return [entry]

    def checked_runtime(self) -> Runtime:
        """Return the runtime.

        Raises `ValueError` when another one, or none, has followed it, and after an abort.
        """
        if not self._is_checked:
            self._check_devices()
        runtime = find()
        if runtime is not self.runtime:
            raise ValueError(
                f"the process group {self.group!r} was made before hvdlite was shut down or began "
                "a new world: call torch.distributed.destroy_process_group(), then "
                "hvd.init_process_group()"
            )
        if self.abort.is_called:
            raise ValueError(
                f"the process group {self.group!r} was ended on this rank by abort(): call "
                "torch.distributed.destroy_process_group(), then make it again on all of its ranks"
            )
        return self.runtime

    def _check_devices(self) -> None:
        """Raise `ValueError` if the user has asked for another backend beside this one.

        torch would use this one for all devices, and not say so.
        """
        configs: Any = dist.distributed_c10d._world.pg_backend_config
        names = dist.distributed_c10d._world.pg_names
        for group, name in names.items():
            config = str(configs.get(group, ""))
            backends = {each.partition(":")[2] for each in config.split(",")} - {"", BACKEND}
            if name == self.torch_name and backends and BACKEND in config:
                raise ValueError(
                    f"backend={config!r}: torch gives the tensors of all devices to {BACKEND}, "
                    f"and none to {', '.join(sorted(backends))}: say backend={BACKEND!r}"
                )
        self._is_checked = True


def _digest(members: Sequence[int]) -> str:
    return sha1(repr(members).encode()).hexdigest()[:12]


@lru_cache(256)
def _reducing(process_set: ProcessSet, reduce_op: ReduceOp, factor: float) -> CallOptions:
    """Return the options of most calls, which come again and again."""
    return CallOptions(process_set, reduce_op=reduce_op, prescale_factor=factor)
