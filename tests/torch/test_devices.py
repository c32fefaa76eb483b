"""Tensors on an accelerator, played by a fake one: its streams do nothing until they are told to.

Memory is that of the host, so that a copy that comes too early or too late is seen in the numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import hvdlite.torch as hvd
from hvdlite.common.api.forms import Forms
from hvdlite.common.tensors.adapter import HOST_DEVICE
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner
from hvdlite.torch.devices import Device, HostDevice, StagedDevice, find_device
from tests.ranks import run_ranks

Tensor = torch.Tensor


class FakeStream:
    """Work in order, done by whoever waits for it."""

    def __init__(self, device: Any = None) -> None:
        self._lock = threading.RLock()
        self._work: list[Callable[[], object]] = []

    def add(self, work: Callable[[], object]) -> int:
        with self._lock:
            self._work.append(work)
            return len(self._work)

    def wait_event(self, event: FakeEvent) -> None:
        self.add(event.synchronize)

    def run(self, until: int) -> None:
        with self._lock:
            for index in range(until):
                work, self._work[index] = self._work[index], _nothing
                work()

    def has_done(self, until: int) -> bool:
        with self._lock:
            return all(work is _nothing for work in self._work[:until])


def _nothing() -> None:
    """Work that was done."""


class FakeEvent:
    """A point in a stream."""

    def record(self, stream: FakeStream) -> None:
        self._stream, self._until = stream, stream.add(_nothing)

    def synchronize(self) -> None:
        self._stream.run(self._until)

    def query(self) -> bool:
        return self._stream.has_done(self._until)


class FakeStreams:
    """In the place of torch.cuda. `copies` counts work on streams that are not the current one."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._current: dict[int, FakeStream] = {}

    def Stream(self, device: Any) -> FakeStream:  # noqa: N802
        return FakeStream(device)

    def Event(self, *, blocking: bool = False) -> FakeEvent:  # noqa: N802
        assert blocking, "waiting must not burn a core"
        return FakeEvent()

    def current_stream(self, device: Any) -> FakeStream:
        stream: FakeStream = self._thread.__dict__.setdefault("stream", FakeStream())
        return stream

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = self.current_stream(None)
        self._thread.stream = stream
        try:
            with _Delayed(stream):
                yield
        finally:
            self._thread.stream = before


class _Delayed(torch.utils._python_dispatch.TorchDispatchMode):
    """Queues copies on a stream instead of doing them."""

    def __init__(self, stream: FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._stream.add(lambda: func(*args, **(kwargs or {})))
            return args[0]
        return func(*args, **(kwargs or {}))


class FakeDevice(StagedDevice):
    """An accelerator whose tensors have the type "cpu"."""

    def __init__(self, name: str = "fake") -> None:
        self.streams = FakeStreams()
        self.kept: list[Tensor] = []
        super().__init__(name, self.streams, pin=False)

    def keep_until_done(self, tensor: Tensor, stream: Any) -> None:
        self.kept.append(tensor)

    def compute(self, work: Callable[[], object]) -> None:
        """Queue work of the user's."""
        self.streams.current_stream(None).add(work)

    def read(self, tensor: Tensor) -> Tensor:
        """The values that the current stream sees."""
        event = FakeEvent()
        event.record(self.streams.current_stream(None))
        event.synchronize()
        return tensor


def on_fake_devices(
    size: int, main: Callable[[int, FakeDevice, Forms[torch.Tensor]], None]
) -> None:
    def body(rank: int) -> None:
        device = FakeDevice()
        main(rank, device, Forms(TorchRunner(TorchAdapter(lambda kind: device))))

    run_ranks(size, body)


def test_the_engine_waits_for_what_was_queued_and_the_user_stream_for_the_result() -> None:
    def main(rank: int, device: FakeDevice, forms: Forms[torch.Tensor]) -> None:
        tensor = torch.zeros(4)
        device.compute(lambda: tensor.add_(rank + 1))
        handle = forms.allreduce_async(tensor, op=hvd.Sum)
        device.compute(lambda: tensor.fill_(-100))  # after the copy to the host
        result = forms.synchronize(handle)
        doubled = torch.empty(4)
        device.compute(lambda: doubled.copy_(result * 2))
        assert device.read(doubled).tolist() == [6.0] * 4
        assert any(each is result for each in device.kept)

    on_fake_devices(2, main)


def test_synchronize_does_not_wait_for_the_copy_to_the_device() -> None:
    def main(rank: int, device: FakeDevice, forms: Forms[torch.Tensor]) -> None:
        tensor = torch.full((4,), float(rank + 1))
        forms.synchronize(forms.allreduce_async_(tensor, op=hvd.Sum))
        assert tensor.tolist() == [rank + 1.0] * 4, "the copy is queued, and nobody asked for it"
        assert device.read(tensor).tolist() == [3.0] * 4

    on_fake_devices(2, main)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_every_collective(dtype: torch.dtype) -> None:
    def main(rank: int, device: FakeDevice, forms: Forms[torch.Tensor]) -> None:
        def same(result: Tensor, expected: list[int]) -> None:
            assert torch.equal(device.read(result), torch.tensor(expected).to(dtype))

        row = torch.tensor([rank, 1]).to(dtype)
        same(forms.allreduce(row, op=hvd.Sum), [1, 2])
        same(forms.allgather(row), [0, 1, 1, 1])
        same(forms.broadcast(row, 1), [1, 1])
        same(forms.alltoall(row), [[0, 1], [1, 1]][rank])
        same(forms.reducescatter(row, op=hvd.Sum), [[1], [2]][rank])
        for result in forms.grouped_allreduce([row, row], op=hvd.Sum):
            same(result, [1, 2])
        matrix = torch.zeros(2, 2, dtype=dtype)
        matrix[:, 0] = row
        forms.broadcast_(matrix[:, 0], 1)
        same(matrix[:, 0], [1, 1])

    on_fake_devices(2, main)


def test_tensors_of_a_group_must_be_on_one_device() -> None:
    def main(rank: int) -> None:
        devices: dict[str, Device] = {"cpu": HostDevice(), "meta": FakeDevice()}
        forms = Forms(TorchRunner(TorchAdapter(devices.__getitem__)))
        with pytest.raises(hvd.HorovodInternalError, match="must be on same device"):
            forms.grouped_allreduce([torch.ones(1), torch.ones(1, device="meta")])

    run_ranks(1, main)


def test_ranks_that_disagree_on_the_device() -> None:
    def main(rank: int) -> None:
        device: Device = FakeDevice() if rank else HostDevice()
        forms = Forms(TorchRunner(TorchAdapter(lambda kind: device)))
        with pytest.raises(hvd.HorovodInternalError, match="device: rank 0 has cpu, rank 1 has"):
            forms.allreduce(torch.ones(1), name="x")

    run_ranks(2, main)


def test_cuda_tensors_are_staged() -> None:
    device = find_device("cuda")
    assert isinstance(device, StagedDevice)
    assert device.name == "cuda"
    assert find_device("cpu").name == HOST_DEVICE


class StreamsWithoutBlocking(FakeStreams):
    """In the place of torch.xpu, whose events have no such option."""

    def Event(self) -> FakeEvent:  # type: ignore[override]  # noqa: N802
        return FakeEvent()


def with_modules(monkeypatch: pytest.MonkeyPatch, modules: dict[str, object]) -> None:
    """Let torch have these device modules."""
    monkeypatch.setattr(torch, "get_device_module", lambda kind: modules[kind])


@pytest.mark.parametrize("kind", ["cuda", "xpu", "npu", "mlu", "privateuseone"])
@pytest.mark.parametrize("streams", [FakeStreams, StreamsWithoutBlocking])
def test_the_device_module_of_torch_stages(
    monkeypatch: pytest.MonkeyPatch, kind: str, streams: type[FakeStreams]
) -> None:
    module = streams()
    with_modules(monkeypatch, {kind: module})
    monkeypatch.setattr("hvdlite.torch.devices.pins", lambda kind: False)
    monkeypatch.setattr(StagedDevice, "keep_until_done", lambda *args: None)

    def main(rank: int) -> None:
        device = find_device(kind)
        forms = Forms(TorchRunner(TorchAdapter(lambda _: device)))
        tensor = torch.zeros(4)
        module.current_stream(None).add(lambda: tensor.add_(rank + 1))
        forms.allreduce_(tensor, op=hvd.Sum)
        assert tensor.tolist() == [rank + 1.0] * 4, "the result is on its way in a stream"
        event = FakeEvent()
        event.record(module.current_stream(None))
        event.synchronize()
        assert tensor.tolist() == [3.0] * 4
        assert device.name == kind

    run_ranks(2, main)


@pytest.mark.parametrize("kind", ["meta", "mps", "vulkan"])
def test_a_device_without_streams_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match=f"tensors on '{kind}' cannot .*tensor.cpu"):
        find_device(kind)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_real_gpu() -> None:
    from hvdlite.torch.mpi_ops import forms

    def main(rank: int) -> None:
        for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64):
            tensor = torch.full((1000, 3), rank + 1, device="cuda", dtype=dtype)
            for _ in range(3):
                result = forms.allreduce(tensor * 2, op=hvd.Sum)
                assert result.device == tensor.device
                assert torch.equal(result, torch.full_like(tensor, 6))
            forms.allreduce_(tensor.t(), op=hvd.Sum)
            assert torch.equal(tensor, torch.full_like(tensor, 3))
        norm = hvd.SyncBatchNorm(3).cuda()
        batch = torch.randn(8, 3, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
        expected = torch.nn.BatchNorm1d(3).cuda()(batch)
        torch.testing.assert_close(norm(batch[rank * 4 :][:4]), expected[rank * 4 :][:4])

    run_ranks(2, main)
