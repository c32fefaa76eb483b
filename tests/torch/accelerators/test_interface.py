"""The interface for vendors: everybody who gives it is whole."""

from __future__ import annotations

from typing import Any

import pytest

from fake_accelerator import FakeLibrary
from fake_accelerator.communicator import FakeCommunicator
from fake_accelerator.context import FakeContext
from fake_accelerator.streams import FakeEvent
from hvdlite.common.devices.interface import Communicator, Context, DeviceLibrary, Event
from hvdlite.common.devices.nccl.communicator import NcclCommunicator
from hvdlite.common.devices.nccl.context import CudaContext, CudaEvent
from hvdlite.common.devices.nccl.library import NcclLibrary
from hvdlite.torch.accelerators.c10d import C10dCommunicator, C10dLibrary
from hvdlite.torch.accelerators.context import HostContext, TorchContext


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
