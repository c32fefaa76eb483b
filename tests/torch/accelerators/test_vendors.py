"""What vendors give: process groups of torch.distributed, played by gloo's, or our interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from fake_accelerator import FakeLibrary
from fake_accelerator.communicator import FakeCommunicator
from fake_accelerator.context import FakeContext
from fake_accelerator.streams import FakeEvent
from hvdlite.common.api.forms import Forms
from hvdlite.common.devices import libraries
from hvdlite.common.devices.interface import Communicator, Context, DeviceLibrary, Event
from hvdlite.common.devices.nccl.communicator import NcclCommunicator
from hvdlite.common.devices.nccl.context import CudaContext, CudaEvent
from hvdlite.common.devices.nccl.library import NcclLibrary
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators import c10d
from hvdlite.torch.accelerators.c10d import C10dCommunicator, C10dLibrary
from hvdlite.torch.accelerators.context import HostContext, TorchContext
from hvdlite.torch.device_modules import accelerator_kind
from hvdlite.torch.devices import HOST_AS_DEVICE
from tests.torch.accelerators.direct import CountingDevice, on_devices


@pytest.fixture(params=[False, True], ids=["plain", "extended"])
def vendor(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A backend that is registered, and the sizes of the groups that it has made."""
    sizes: list[int] = []
    made: Any = vars(dist)["ProcessGroupGloo"]

    def create(store: Any, rank: int, size: int, timeout: Any) -> Any:
        sizes.append(size)
        return made(store, rank, size, timeout)

    def create_extended(options: Any, own: Any) -> Any:
        assert options.global_ranks_in_group == list(range(options.group_size))
        return create(options.store, options.group_rank, options.group_size, options.timeout)

    plug_in = dist.Backend._BackendPlugin(
        create_extended if request.param else create, request.param
    )
    monkeypatch.setitem(dist.Backend._plugins, "XCCL2", plug_in)
    maker = c10d._maker("xccl2")
    assert maker is not None
    library = c10d.C10dLibrary(HOST_AS_DEVICE, "xccl2", maker)
    library.shares_devices = True
    registered = libraries._Registered(lambda: library, by_name_only=True)
    monkeypatch.setitem(libraries._registered, "vendor", registered)
    yield sizes


def test_a_registered_backend_reduces(vendor: list[int]) -> None:
    def main(rank: int, forms: Forms[torch.Tensor], device: CountingDevice) -> None:
        assert forms.allreduce(torch.full((3,), rank + 1.0), op=hvd.Sum).tolist() == [3.0] * 3
        assert forms.broadcast(torch.full((2,), rank, dtype=torch.int16), 1).tolist() == [1, 1]
        assert device.staged == 0
        assert forms.allreduce(torch.ones(1).double(), op=hvd.Sum).tolist() == [2.0]
        assert device.staged == 2, "nobody knows whether an unknown library has float64"

    on_devices(2, main, Config(devices="vendor"))
    assert vendor == [2, 2], "each rank has made one group of its own"


def test_the_default_group_is_not_touched(vendor: list[int]) -> None:
    def main(rank: int, forms: Forms[torch.Tensor], device: CountingDevice) -> None:
        forms.allreduce(torch.ones(1))
        assert not dist.is_initialized()

    on_devices(2, main, Config(devices="vendor"))


def test_a_machine_without_an_accelerator_has_no_library() -> None:
    if accelerator_kind() is None:
        assert libraries.find_libraries("auto") == []
    assert c10d._maker("hccl") is None or "HCCL" in dist.Backend._plugins


def test_groups_of_nccl_never_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that make groups at the same time leave the variable as it was."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.setenv(name, "3")
    together = threading.Barrier(2, timeout=20)
    seen = []

    def make() -> None:
        with c10d._quiet_nccl:
            together.wait()
            seen.append(c10d.os.environ[name])
            together.wait()

    threads = [threading.Thread(target=make) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == ["0", "0"]
    assert c10d.os.environ[name] == "3"


@pytest.mark.parametrize(
    ("protocol", "given"),
    [
        (DeviceLibrary, [FakeLibrary, C10dLibrary, NcclLibrary]),
        (Context, [FakeContext, TorchContext, HostContext, CudaContext]),
        (Communicator, [FakeCommunicator, C10dCommunicator, NcclCommunicator]),
        (Event, [FakeEvent, CudaEvent]),
    ],
)
def test_each_implementation_has_all_methods(protocol: Any, given: list[Any]) -> None:
    """Also those that a rare path alone calls."""
    methods = {name for name in vars(protocol) if callable(getattr(protocol, name))}
    for one in given:
        assert {name for name in methods - set(dir(one)) if not name.startswith("_")} == set()
