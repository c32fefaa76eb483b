"""The communicators of the fake accelerator: members meet in a hub, and one of them computes.

A failure is what it is with real libraries: the collective never ends, `async_error` says why, and
`abort` lets the stream go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite.common.base.reduce_op import ReduceOp

Tensor = torch.Tensor
_OPS: dict[ReduceOp, Callable[[Tensor, Tensor], Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.MIN: torch.minimum,
    ReduceOp.MAX: torch.maximum,
}


class AbortedError(Exception):
    """The stream goes on without a result."""


class Hub:
    """Where the members of one communicator meet, once for each collective."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._condition = threading.Condition()
        self._given: dict[int, dict[int, Any]] = {}  # By round and member.

    def exchange(self, number: int, index: int, value: Any, stop: threading.Event) -> list[Any]:
        """Return what all members give in the round `number`; sleeps until all have come."""
        with self._condition:
            given = self._given.setdefault(number, {})
            given[index] = value
            self._condition.notify_all()
            while len(given) < self.size:
                if stop.is_set():
                    raise AbortedError
                self._condition.wait(0.05)
        return [given[member] for member in range(self.size)]

    def wake(self) -> None:
        """Let those that sleep look again."""
        with self._condition:
            self._condition.notify_all()


class FakeCommunicator:
    """A member of a communicator. `failures` says which of its collectives fail, and why."""

    def __init__(
        self, hub: Hub, index: int, failures: dict[int, str], journal: list[str], name: str
    ) -> None:
        self._hub = hub
        self._index = index
        self._failures = failures
        self._journal = journal
        self._name = name
        self._round = 0
        self._error = ""
        self._stop = threading.Event()
        self.is_closed = False

    @property
    def is_aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._stop.is_set()

    def allreduce(self, source: Tensor, target: Tensor, op: ReduceOp, stream: Any) -> None:
        """See `hvdlite.common.devices.interface.Communicator`, also below."""
        target.copy_(self._reduced("allreduce", source, op))

    def reduce(self, source: Tensor, target: Tensor, op: ReduceOp, root: int, stream: Any) -> None:
        total = self._reduced("reduce", source, op)
        if self._index == root:
            target.copy_(total)

    def broadcast(self, buffer: Tensor, root: int, stream: Any) -> None:
        buffer.copy_(self._gathered("broadcast", buffer)[root])

    def allgather(self, source: Tensor, target: Tensor, stream: Any) -> None:
        target.copy_(torch.cat(self._gathered("allgather", source)))

    def reducescatter(self, source: Tensor, target: Tensor, op: ReduceOp, stream: Any) -> None:
        total = self._reduced("reducescatter", source, op)
        target.copy_(total.chunk(self._hub.size)[self._index])

    def alltoall(
        self,
        source: Tensor,
        send_counts: Sequence[int],
        target: Tensor,
        receive_counts: Sequence[int],
        stream: Any,
    ) -> None:
        parts = self._exchange("alltoall", [part.clone() for part in source.split(send_counts)])
        target.copy_(torch.cat([of_member[self._index] for of_member in parts]))

    def _reduced(self, what: str, source: Tensor, op: ReduceOp) -> Tensor:
        first, *others = self._gathered(what, source)
        total = first.clone()
        for other in others:
            total = _OPS[op](total, other)
        return total

    def _gathered(self, what: str, source: Tensor) -> list[Tensor]:
        return self._exchange(what, source.clone())

    def _exchange(self, what: str, value: Any) -> list[Any]:
        self._journal.append(what)
        self._round += 1
        if self._round in self._failures:
            self._error = self._failures[self._round]
            self._stop.wait()
        if self._stop.is_set():
            raise AbortedError
        given = self._hub.exchange(self._round, self._index, value, self._stop)
        self._journal.append(f"{what} done")
        return given

    def async_error(self) -> str:
        return self._error

    def abort(self) -> None:
        self._journal.append(f"abort {self._name}")
        self._stop.set()
        self._hub.wake()

    def close(self) -> None:
        self._journal.append(f"close {self._name}")
        self.is_closed = True
