"""The context of a fake device: streams, events, memory and copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from fake_accelerator.streams import FakeEvent, FakeModule, FakeStream
from hvdlite.common.devices.interface import HostMemory
from hvdlite.torch.dtypes import as_array

Tensor = torch.Tensor


class FakeContext:
    """One device of one rank. `journal` names what its streams have done, in order."""

    threads_wait = False

    def __init__(self, module: FakeModule, identity: str, journal: list[str]) -> None:
        self.identity = identity
        self._module = module
        self._journal = journal

    def new_stream(self) -> FakeStream:
        """Return a stream for communication."""
        return self._module.Stream()

    def free_stream(self, stream: FakeStream) -> None:
        """End it."""
        stream.close()

    def run(self, stream: FakeStream, work: Callable[[], None]) -> None:
        """Queue work. The collectives of a communicator are called by the stream itself."""
        stream.add(work)

    def allocating(self, stream: FakeStream) -> AbstractContextManager[None]:
        """Return a context that changes nothing: memory belongs to no stream."""
        return nullcontext()

    def record(self, stream: FakeStream) -> FakeEvent:
        """Return an event after what is queued."""
        event = FakeEvent()
        event.record(stream)
        return event

    def record_timed(self, stream: FakeStream) -> FakeEvent:
        """Return an event that knows when it occurs, as all do."""
        return self.record(stream)

    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Let the stream wait."""
        stream.wait_event(event)

    def empty(self, count: int, dtype: str) -> Tensor:
        """Allocate memory."""
        return torch.empty(count, dtype=getattr(torch, dtype))

    def fill(self, buffer: Tensor, value: Any) -> None:
        """Set all elements."""
        buffer.fill_(value)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """Copy all."""
        self._journal.append(f"copy {len(targets)}")
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def scale(self, buffer: Tensor, factor: float) -> None:
        """Multiply all elements."""
        self._journal.append("scale")
        buffer.mul_(factor)

    def host_memory(self, count: int, dtype: str) -> HostMemory:
        """Allocate memory of the host."""
        tensor = self.empty(count, dtype)
        return HostMemory(tensor, as_array(tensor))

    def keep(self, buffer: Tensor, stream: FakeStream) -> None:
        """Do nothing: what is queued refers to the memory."""
