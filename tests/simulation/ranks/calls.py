"""Collectives and messages of a program, and what numpy says that they give."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdlite.common.base.lists import split_rows
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.messages import NO_RANK, Request
from hvdlite.common.requests.process_set_table import GLOBAL_ID
from hvdlite.common.tensors.adapter import HOST_DEVICE

Array = NDArray[Any]


class Tensor(Entry):
    """A tensor of a program on its way through the engine."""

    def __init__(self, request: Request, array: Array, splits: tuple[int, ...] = ()) -> None:
        super().__init__(request)
        self.splits = splits
        self.size_bytes = array.nbytes
        self.result: Array = np.empty(0)
        self._array = array.reshape(-1)

    @property
    def input(self) -> Array:
        return self._array

    def output(self, shape: tuple[int, ...]) -> Array:
        self.result = np.full(shape, 99, self._array.dtype)
        return self.result.reshape(-1)


@dataclass(frozen=True)
class Call:
    """One named collective, which members make once in each round."""

    name: str
    collective: str
    op: ReduceOp
    root: int  # By index in the set; one of the members that join last.
    columns: int
    seed: int
    odd: int | None = None  # The index of a member whose shape differs from those of others.

    def input(self, index: int, size: int, round_: int) -> Array:
        """Return small whole numbers; the rows of an allgather now and then change on one rank."""
        rows = 0 if self.collective == "allgather" else 2 * size
        return _input(self.seed, index, round_, rows, self.columns + (index == self.odd))

    def entries(
        self, process_set_id: int, members: Sequence[int], index: int, round_: int
    ) -> list[Entry]:
        """Return what the member at `index` enqueues."""
        name = f"{self.collective}.{self.name}"
        if self.collective == "barrier":
            return [Entry(Request(process_set_id, name, "barrier"))]
        array = self.input(index, len(members), round_)
        grouped = self.collective == "grouped"
        reduces = self.collective in ("allreduce", "reducescatter", "grouped")
        request = Request(
            process_set_id,
            name,
            "allreduce" if grouped else self.collective,
            "float64",
            array.shape,
            HOST_DEVICE,
            int(self.op) if reduces else 0,
            members[self.root] if self.collective == "broadcast" else NO_RANK,
            group=name if grouped else "",
            group_size=2 if grouped else 0,
        )
        if grouped:
            return [
                Tensor(request._replace(name=f"{name}_{number}of2"), array + number)
                for number in range(2)
            ]
        splits = (2,) * len(members) if self.collective == "alltoall" else ()
        return [Tensor(request, array, splits)]

    def expected(self, index: int, size: int, round_: int, present: Sequence[int]) -> list[Array]:
        """Return what the member at `index` gets where only those `present` have not joined."""
        inputs = [self.input(each, size, round_) for each in present]
        match self.collective:
            case "barrier":
                return []
            case "broadcast":
                return [self.input(self.root, size, round_)]
            case "allgather":
                return [np.concatenate(inputs)]
            case "alltoall":
                return [np.concatenate([each[2 * index : 2 * index + 2] for each in inputs])]
            case "grouped":
                return [self._reduced([each + n for each in inputs], size) for n in range(2)]
        total = self._reduced(inputs, size)
        if self.collective == "reducescatter":
            total = np.split(total, [*itertools.accumulate(split_rows(2 * size, size))])[index]
        return [total]

    def _reduced(self, inputs: Sequence[Array], size: int) -> Array:
        if self.op == ReduceOp.MIN:
            return np.min(inputs, 0)  # type: ignore[no-any-return]
        if self.op == ReduceOp.MAX:
            return np.max(inputs, 0)  # type: ignore[no-any-return]
        total: Array = np.sum(inputs, 0)
        return total * (1.0 / size) if self.op == ReduceOp.AVERAGE else total


@lru_cache(maxsize=1024)  # All ranks ask for the same.
def _input(seed: int, index: int, round_: int, rows: int, columns: int) -> Array:
    """Return what nobody may change; `rows` is 0 where one more may come at random."""
    lot = np.random.Generator(np.random.PCG64([seed, index, round_]))
    rows = rows or 1 + index + (int(lot.integers(0, 4)) == 0)
    array = lot.integers(0, 9, (rows, columns)).astype(np.float64)
    array.flags.writeable = False
    return array


@dataclass(frozen=True)
class Message:
    """A tensor that each of some ranks sends to one, which takes them as they come."""

    name: str
    senders: tuple[int, ...]
    receiver: int
    columns: int
    searches: bool  # The receiver asks who has sent first.

    def data(self, sender: int) -> Array:
        return np.arange(self.columns, dtype=np.float64) + 100 * sender

    def label(self, sender: int) -> str:
        return f"point_to_point.{sender}.{self.receiver}.{self.name}"

    def entry(self, sender: int, *, sends: bool) -> Tensor:
        """Return what the sender, or the receiver, enqueues."""
        request = Request(
            GLOBAL_ID,
            self.label(sender),
            "point_to_point",
            "float64",
            (self.columns,),
            HOST_DEVICE,
            root_rank=sender,
            parties=(min(sender, self.receiver), max(sender, self.receiver)),
        )
        return Tensor(request, self.data(sender) if sends else np.zeros(self.columns))

    def search(self, senders: Sequence[int]) -> Entry:
        """Return the question which of the senders has sent first."""
        request = Request(
            GLOBAL_ID,
            f"find_sender.{self.name}.{len(senders)}",
            "find_sender",
            shape=tuple(senders),
            settings="\n".join(map(self.label, senders)),
            parties=(self.receiver,),
        )
        return Entry(request)
