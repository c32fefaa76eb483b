"""Which device a rank communicates on, and how ranks tell devices from each other."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from hvdlite.torch.accelerators import c10d, context, nccl
from hvdlite.torch.accelerators.context import HostStreams, TorchContext
from hvdlite.torch.devices import StagedDevice
from tests.common.devices.nccl.fake import Fake
from tests.ranks import run_threads
from tests.torch.accelerators.direct import CountingDevice


class Module:
    """The device module of four devices."""

    def device_count(self) -> int:
        return 4


@pytest.mark.parametrize("library", ["c10d", "nccl"])
def test_the_first_tensor_chooses_the_device_and_local_rank_where_there_is_none(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `set_device(local_rank)` both are the same device."""
    monkeypatch.setattr(context, "_identity", str)
    monkeypatch.setattr(context, "streams_of", lambda kind: Module())
    made: Any = nccl.TorchFramework()
    if library == "c10d":
        made = c10d.C10dLibrary("cuda", "nccl", lambda *arguments: None)
    assert made.context(None, 2).device == torch.device("cuda", 2)
    assert made.context(None, 5).device == torch.device("cuda", 1), "each sees four, by turns"
    assert made.context(torch.device("cuda", 3), 0).device == torch.device("cuda", 3)


def test_ranks_that_see_one_device_each_do_not_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By --gpus-per-rank 1 all have number 0; what the variables list tells them apart."""

    def identity(seen: str) -> str:
        monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", seen)
        return TorchContext(torch.device("privateuseone", 0), Module()).identity  # type: ignore[arg-type]

    assert identity("0") == identity("0")
    assert identity("0") != identity("1")


def test_the_bus_tells_devices_apart_where_torch_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that list a device in different orders use the same one."""

    class Properties:
        uuid = "GPU-1"

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    made = []
    for seen, number in (("0,1", 1), ("1", 0)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
        made.append(TorchContext(torch.device("cuda", number), Module()).identity)  # type: ignore[arg-type]
    assert made[0] == made[1]
    assert made[0].endswith("cuda GPU-1")


def test_a_tensor_of_another_device_is_copied_to_that_of_the_rank() -> None:
    """The second device is torch's "meta", which has no values, so only places are seen."""
    device: StagedDevice = CountingDevice()
    first = torch.ones(2)
    device.input(first)
    assert device.at_home(first).data_ptr() == first.data_ptr()
    device.home = torch.device("meta")
    moved = device.at_home(torch.ones(2, 3))
    assert (moved.device.type, moved.shape) == ("meta", (6,))
    output: Any = device.output(torch.ones(2, 3))
    assert output.buffer.device.type == "meta"


def test_the_device_of_a_tensor_is_known_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine asks for it while no stream is chosen, which a copy would be behind."""
    device = CountingDevice()
    given: Any = device.input(torch.ones(4, 2).t())
    monkeypatch.setattr(device, "at_home", lambda tensor: pytest.fail("a copy was made"))
    assert given.device == torch.device("cpu")


def test_a_thread_that_asks_events_chooses_the_device(
    fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a device would use the first; one that asks would end graphs of others."""
    chosen: list[Any] = []

    class WithDevice(Module):
        set_device = chosen.append

    monkeypatch.setattr(context, "_identity", str)
    monkeypatch.setenv("HVDLITE_CUDART_LIBRARY", fake.path)
    place = torch.device("cuda", 3)
    made = TorchContext(place, WithDevice())  # type: ignore[arg-type]
    mode = ctypes.c_int(0)

    def main(_: int) -> None:
        made.begin_thread()
        fake.c.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    run_threads(1, main)
    assert (chosen, mode.value) == ([place], 1)
    monkeypatch.setenv("HVDLITE_CUDART_LIBRARY", "/none/libcudart.so.12")
    made.begin_thread()  # As with a torch for other GPUs.


def test_a_graph_that_is_recorded_takes_no_negotiated_collective() -> None:
    """It would repeat the copies without the ranks."""

    class Recording(HostStreams):
        def is_current_stream_capturing(self) -> bool:
            return True

    device = CountingDevice(streams=Recording())
    with pytest.raises(ValueError, match=r"shape \(2, 3\) cannot be part.*GraphCollectives"):
        device.input(torch.ones(2, 3))
