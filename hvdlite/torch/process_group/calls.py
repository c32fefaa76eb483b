"""The way from tensors and options of torch to entries of the engine.

Names are ``pg.<group>.<collective>.<counter>``: c10d has one order of calls for each group instead
of names. The group is part of the name, as two groups of the same ranks are one process set.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hvdlite.common.api.options import CallOptions
from hvdlite.common.api.submit import prepared_once
from hvdlite.common.api.tensor_entries import PlacedEntry, PreparedCall, TensorEntry
from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.plain.entries import Entry, key_of
from hvdlite.common.plain.messages import Request
from hvdlite.common.runtime.process_sets import ProcessSet
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import find
from hvdlite.torch.mpi_ops import runner
from hvdlite.torch.process_group.aborting import Abort
from hvdlite.torch.process_group.reduce_ops import translate
from hvdlite.torch.process_group.registration import BACKEND

ADAPTER = runner.adapter


class FittedEntry(TensorEntry[torch.Tensor]):
    """A tensor whose output must fit what other ranks send, which only the run can tell.

    `expected` are the rows that each member shall send. If others come, the collective has run for
    all ranks, and fails on this one afterwards.
    """

    def __init__(
        self,
        request: Request,
        tensor: torch.Tensor,
        target: torch.Tensor,
        splits: tuple[int, ...],
        expected: Sequence[int],
    ) -> None:
        super().__init__(request, ADAPTER, tensor, target, splits)
        self._expected = tuple(expected)

    def wait_for_result(self) -> torch.Tensor:
        """Sleep until the collective has run; return the result, or raise for other rows."""
        try:
            result = super().wait_for_result()
        except HorovodInternalError:
            if self._error:  # There was no room for what came.
                raise self._unexpected() from None
            raise
        if self.rows and self.rows != self._expected:
            raise self._unexpected()
        return result

    def _unexpected(self) -> HorovodInternalError:
        return HorovodInternalError(
            f"{self.request.collective} '{self.request.name}': the outputs of this rank have room "
            f"for {list(self._expected)} elements or rows, by rank of the group, but "
            f"{list(self.rows)} came: give outputs of the sizes that the ranks send",
            job_goes_on=True,
        )


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
        self._numbers: Counter[str] = Counter()
        self._is_checked = False
        # Checked calls by what is checked; only their names are new each time.
        self._known: dict[Any, PreparedCall] = {}

    def be_called(self, group: str) -> None:
        """Take the name that torch gives.

        After destroy_process_group() torch begins with the same names, also for other members: how
        often a group was made is the same on its members only.
        """
        self.torch_name = group
        made = _made.setdefault(self.runtime, Counter())
        key = group, *self.members
        made[key] += 1
        self.group = group if made[key] == 1 else f"{group}@{made[key]}"

    # -- options

    def reducing(self, op: Any) -> CallOptions:
        """Return the options of a reduction by an op of torch. Raises `ValueError`."""
        return _reducing(self.process_set, *translate(op))

    def reducing_to(self, root: int, op: Any) -> CallOptions:
        """Return the options of a reduction to a rank of the group."""
        return self.reducing(op)._replace(root_rank=self.members[root])

    def rooted(self, root: int) -> CallOptions:
        """Return the options of a call with a root, which is a rank of the group."""
        return CallOptions(self.process_set, root_rank=self.members[root])

    def plain(self, splits: Sequence[int] | None = None) -> CallOptions:
        """Return the options of a call without further options."""
        return CallOptions(self.process_set, splits=splits)

    # -- calls

    def first_number(self, kind: str) -> int:
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

    def count(self, kind: str, calls: int) -> None:
        """Use up the numbers of calls that were made."""
        self._numbers[kind] += calls

    def name(self, kind: str, number: int) -> str:
        """Return the name of a call."""
        return f"pg.{self.group}.{kind}.{number}"

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
        expected = expected or [()] * len(tensors)
        kind = kind or collective
        first = self.first_number(kind)
        entries = [
            self._entry(collective, self.name(kind, first + index), *each, options)
            for index, each in enumerate(zip(tensors, targets, expected, strict=True))
        ]
        runtime.engine.enqueue(entries)
        self.count(kind, len(entries))
        return entries

    def _entry(
        self,
        collective: str,
        name: str,
        tensor: torch.Tensor,
        target: torch.Tensor,
        expected: Sequence[int],
        options: CallOptions,
    ) -> Entry:
        """Return the entry of one tensor."""
        call, splits = self._prepared(collective, name, tensor, options)
        if target is tensor:
            place = ADAPTER.place(tensor, call.spec)
            if place is not None:
                return PlacedEntry(call, ADAPTER, tensor, place)
        elif _overlap(tensor, target) and not self._is_own_part(tensor, target):
            tensor = tensor.clone()  # Others read it while this rank writes.
        if expected:
            return FittedEntry(call.request, tensor, target, splits, expected)
        return TensorEntry(call.request, ADAPTER, tensor, target, splits)

    def _prepared(
        self, collective: str, name: str, tensor: torch.Tensor, options: CallOptions
    ) -> tuple[PreparedCall, tuple[int, ...]]:
        """Return the call for a tensor, which is checked once for all like it."""
        if options.splits is not None:
            return prepared_once(self.runtime, ADAPTER, collective, name, tensor, options)
        kind = collective, tensor.dtype, tensor.shape, tensor.device, tensor.layout, options
        known = self._known.get(kind)
        if known is not None:
            request = known.request._replace(name=name)
            return known._replace(request=request, key=key_of(request)), ()
        call, splits = prepared_once(self.runtime, ADAPTER, collective, name, tensor, options)
        if len(self._known) >= MOST_KNOWN:
            self._known.clear()
        self._known[kind] = call
        return call, splits

    def _is_own_part(self, tensor: torch.Tensor, target: torch.Tensor) -> bool:
        """Return whether an input lies where the output gets its values anyway."""
        rank = self.members.index(self.runtime.rank)
        return (
            target.nbytes == tensor.nbytes * len(self.members)
            and tensor.data_ptr() == target.data_ptr() + rank * tensor.nbytes
        )

    def signal(self, collective: str) -> list[Entry]:
        """Enqueue a collective without a tensor."""
        runtime = self.checked_runtime()
        name = self.name(collective, self.first_number(collective))
        entry = Entry(Request(self.process_set.process_set_id or 0, name, collective))
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


@lru_cache(256)
def _reducing(process_set: ProcessSet, reduce_op: ReduceOp, factor: float) -> CallOptions:
    """Return the options of most calls, which come again and again."""
    return CallOptions(process_set, reduce_op=reduce_op, prescale_factor=factor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as one row, without copying a contiguous one."""
    return tensor.detach().reshape(-1)


def _overlap(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two tensors have memory in common, as a contiguous range."""
    if first.untyped_storage().data_ptr() != second.untyped_storage().data_ptr():
        return False
    start, other = first.data_ptr(), second.data_ptr()
    return start < other + second.nbytes and other < start + first.nbytes
