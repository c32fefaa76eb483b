"""Process sets as users hold them: subsets of the ranks that communicate among themselves."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from hvdlite.common.requests.entries import Entry
from hvdlite.common.requests.process_set_table import GLOBAL_ID, FormedSet
from hvdlite.common.runtime.process_state import rank_of_caller

RanksOrComm = Any  # an iterable of ints, or an mpi4py communicator


class ProcessSet:
    """Some of the ranks of the job.

    `ranks_or_comm` is an iterable of global ranks (any order) or an ``mpi4py.MPI.Comm`` whose
    members form the set. The set can be used once it was given to ``init(process_sets=...)`` or
    `add_process_set`. Raises `ValueError` for anything else.
    """

    process_set_id: int | None = None
    ranks: list[int] | None = None
    mpi_comm: Any = None

    def __init__(self, ranks_or_comm: RanksOrComm) -> None:
        if is_communicator(ranks_or_comm):
            self.mpi_comm = ranks_or_comm
            return
        if isinstance(ranks_or_comm, str) or not isinstance(ranks_or_comm, Iterable):
            raise ValueError(
                f"a process set is made of a list of ranks or an mpi4py communicator, "
                f"not of {type(ranks_or_comm).__name__} {ranks_or_comm!r}"
            )
        ranks = list(ranks_or_comm)
        wrong = [rank for rank in ranks if not isinstance(rank, int) or isinstance(rank, bool)]
        if wrong:
            raise ValueError(f"a process set is made of ranks (ints), not of {wrong[0]!r}")
        self.ranks = sorted(ranks)

    def size(self) -> int:
        """Return the number of members. Raises `ValueError` while the set is not registered."""
        return len(self._registered())

    def rank(self) -> int | None:
        """Return the position of this rank in the set; None while the set is not registered.

        Raises `ValueError` when this rank is not a member.
        """
        if self.process_set_id is None:
            return None
        members = self._registered()
        rank = rank_of_caller()
        if rank not in members:
            raise ValueError(f"rank {rank} is not part of provided process set {self}")
        return members.index(rank)

    def included(self) -> bool | None:
        """Return whether this rank is a member; None while the ranks are not known."""
        return None if self.ranks is None else rank_of_caller() in self.ranks

    def _registered(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            raise ValueError(f"{self} does not exist or has not been registered")
        return self.ranks

    def _bind(self, process_set_id: int, ranks: Iterable[int]) -> None:
        self.process_set_id = process_set_id
        if self.ranks is None:
            self.ranks = []
        self.ranks[:] = list(ranks)  # In place: users may hold the list.

    def _vanish(self) -> None:
        """Have no members any more: all of them were lost."""
        self._invalidate()
        if self.ranks is not None:
            self.ranks.clear()

    def _invalidate(self) -> None:
        self.process_set_id = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A copy of the set of all ranks would not be bound by init(), and have no members.
        if self is global_process_set:
            return "global_process_set"
        return super().__reduce_ex__(protocol)

    def __str__(self) -> str:
        return (
            f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks}, "
            f"mpi_comm={self.mpi_comm})"
        )

    __repr__ = __str__


def is_communicator(value: object) -> bool:
    """Return whether `value` is an mpi4py communicator, without importing mpi4py."""
    return any(
        cls.__module__.startswith("mpi4py") and cls.__name__ == "Comm"
        for cls in type(value).__mro__
    )


global_process_set = ProcessSet([])
global_process_set.ranks = None
global_process_set.process_set_id = GLOBAL_ID


class FormedSets:
    """The uses that this rank has begun, and not released, of sets that only members have made."""

    def __init__(self) -> None:
        # By the id of its object, which is kept: the number of the use, and its set.
        self.uses: dict[int, tuple[FormedSet, ProcessSet]] = {}
        # The sets that threads of this rank are forming: one thread at a time for each.
        self._forming: set[tuple[int, ...]] = set()
        self._changed = threading.Condition()
        # By members: requests that nobody waits for; the next call for these ranks takes it over.
        self.abandoned: dict[tuple[int, ...], Entry] = {}

    def close(self) -> None:
        """Let no set be used any more."""
        while self.uses:
            _, (_, process_set) = self.uses.popitem()
            process_set._invalidate()

    @contextmanager
    def alone(self, members: tuple[int, ...]) -> Iterator[None]:
        """Let one thread of this rank at a time form the set of these ranks."""
        with self._changed:
            self._changed.wait_for(lambda: members not in self._forming)
            self._forming.add(members)
        try:
            yield
        finally:
            with self._changed:
                self._forming.discard(members)
                self._changed.notify_all()
