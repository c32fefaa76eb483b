"""What calls on a device must not cost, nor risk: events, memory in use, kernels for packing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from fake_accelerator.context import FakeContext
from hvdlite.common.devices.nccl import context as nccl_context
from hvdlite.common.devices.nccl.cudart import CudaRuntime
from hvdlite.torch.accelerators.context import HostEvent, HostStreams, TorchContext
from hvdlite.torch.devices import StagedDevice
from tests.common.devices.nccl.fake import Fake
from tests.torch.accelerators.direct import on_devices
from tests.torch.accelerators.fakes import Rank, on_fake

CPU = torch.device("cpu")
TENSORS = 100
WITHOUT_TIME, BLOCKING = 2, 1  # cudaEventDisableTiming, cudaEventBlockingSync


# -- events


def test_calls_make_events_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """An event with a time costs the device more, and nobody reads it."""
    made: list[dict[str, Any]] = []
    build = HostEvent.__init__

    def noted(self: HostEvent, **flags: Any) -> None:
        made.append(flags)
        build(self, **flags)

    monkeypatch.setattr(HostEvent, "__init__", noted)

    def main(rank: int, forms: Any, device: StagedDevice) -> None:
        for op in (hvd.Sum, hvd.Average):
            forms.allreduce(torch.ones(3), op=op)
            forms.grouped_allreduce_([torch.ones(2), torch.ones(4)], op=op)
        forms.broadcast(torch.ones(2), 0)
        assert device.staged == 0  # type: ignore[attr-defined]

    on_devices(2, main)
    assert len(made) >= 2 * 5
    assert not any(flags.get("enable_timing") for flags in made)
    assert all(flags.get("blocking") for flags in made), "a thread that waits would spin"


def test_torch_is_asked_for_times_where_somebody_wants_them() -> None:
    made: list[dict[str, Any]] = []

    class Streams(HostStreams):
        def Event(self, **flags: Any) -> HostEvent:  # noqa: N802  # type: ignore[override]
            made.append(flags)
            return HostEvent(**flags)

    context, stream = TorchContext(CPU, Streams()), HostStreams().current_stream()
    context.record(stream)
    context.record_timed(stream)
    assert made == [{"blocking": True}, {"enable_timing": True}]


def test_events_of_cuda_have_these_flags(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    new = CudaRuntime.new

    def noted(self: CudaRuntime, name: str, *arguments: Any) -> Any:
        if name == "cudaEventCreateWithFlags":
            made.append(arguments[0])
        return new(self, name, *arguments)

    monkeypatch.setattr(CudaRuntime, "new", noted)
    context = nccl_context.CudaContext(CudaRuntime(fake.path), 0)
    stream = context.new_stream()
    made.clear()
    context.record(stream).synchronize()
    context.record_timed(stream).synchronize()
    assert made == [BLOCKING | WITHOUT_TIME, BLOCKING]


# -- memory that another stream uses


class Watched:
    """In the place of a tensor on a device: notes the streams for which its memory is kept."""

    def __init__(self) -> None:
        self.is_cpu = False
        self.streams: list[Any] = []

    def record_stream(self, stream: Any) -> None:
        self.streams.append(stream)


def test_torch_keeps_memory_for_the_stream_that_uses_it() -> None:
    tensor: Any = Watched()
    stream = object()
    TorchContext(CPU, HostStreams()).keep(tensor, stream)
    StagedDevice("fake", HostStreams(), pin=False).keep_until_done(tensor, stream)
    assert tensor.streams == [stream, stream]


@pytest.mark.parametrize(
    "call",
    [
        lambda forms, tensors: forms.grouped_allreduce(tensors, op=hvd.Sum),
        lambda forms, tensors: forms.grouped_allreduce_(tensors, op=hvd.Sum),
        lambda forms, tensors: forms.grouped_allgather(tensors),
        lambda forms, tensors: [forms.broadcast(each, 0) for each in tensors],
    ],
    ids=["allreduce", "in place", "allgather", "broadcast"],
)
def test_inputs_and_outputs_are_kept_for_the_communication_stream(
    call: Callable[[Any, list[torch.Tensor]], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the allocator would give their memory away while a collective reads or writes it."""
    kept: list[tuple[int, Any]] = []
    ours: set[Any] = set()
    new_stream = FakeContext.new_stream

    def noted(self: FakeContext) -> Any:
        stream = new_stream(self)
        ours.add(stream)
        return stream

    monkeypatch.setattr(FakeContext, "new_stream", noted)
    monkeypatch.setattr(
        FakeContext, "keep", lambda _, buffer, stream: kept.append((buffer.data_ptr(), stream))
    )

    def main(here: Rank) -> list[int]:
        tensors = [torch.ones(number) for number in (3, 5)]
        results = call(here.forms, tensors)
        for result in results:
            here.read(result)
        hvd.barrier()
        return [each.data_ptr() for each in (*tensors, *results)]

    wanted = on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch)
    assert {address for address, _ in kept} >= {address for rank in wanted for address in rank}
    assert {stream for _, stream in kept} <= ours


# -- packing


class Operations(TorchDispatchMode):
    """Counts the operations that torch runs."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_torch_packs_many_tensors_in_one_operation() -> None:
    context = TorchContext(CPU, HostStreams())
    sources = [torch.full((number + 1,), float(number)) for number in range(TENSORS)]
    targets = [torch.empty_like(source) for source in sources]
    with Operations() as seen:
        context.copy(targets, sources)
    assert seen.names == ["aten._foreach_copy_.default"]
    assert all(map(torch.equal, targets, sources))


def test_many_gradients_are_packed_and_unpacked_in_one_call_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def main(here: Rank) -> list[str]:
        tensors = [torch.full((number + 1,), here.rank + 1.0) for number in range(TENSORS)]
        here.forms.grouped_allreduce_(tensors, op=hvd.Sum)
        assert all(here.read(each) == [3.0] * each.numel() for each in tensors)
        return [line for line in here.journal if not line.endswith("done")]

    for journal in on_fake(main, [FakeLibrary(), FakeLibrary()], monkeypatch):
        assert journal == [f"copy {TENSORS}", "allreduce", f"copy {TENSORS}"]
