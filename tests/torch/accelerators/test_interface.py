"""The interface for vendors: everybody who gives it is whole, and the page for them names all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fake_accelerator import FakeLibrary
from fake_accelerator.communicator import FakeCommunicator
from fake_accelerator.context import FakeContext
from fake_accelerator.streams import FakeEvent
from hvdlite.common.devices.interface import Communicator, Context, DeviceLibrary, Event, TimedEvent
from hvdlite.common.devices.nccl.communicator import NcclCommunicator
from hvdlite.common.devices.nccl.context import CudaContext, CudaEvent
from hvdlite.common.devices.nccl.library import NcclLibrary
from hvdlite.torch.accelerators.c10d import C10dCommunicator, C10dLibrary
from hvdlite.torch.accelerators.context import HostContext, TorchContext

PAGE = Path(__file__).parents[3] / "docs" / "devices.md"


def members(protocol: Any) -> set[str]:
    """The methods of a protocol, and its attributes."""
    names = {name for name in vars(protocol) if not name.startswith("_")}
    return names | set(protocol.__annotations__)


@pytest.mark.parametrize("protocol", [DeviceLibrary, Context, Communicator, Event, TimedEvent])
def test_the_page_for_vendors_names_each_member(protocol: Any) -> None:
    vendors = PAGE.read_text().split("## For a vendor", 1)[1]
    cells = [line.split("|")[1] for line in vendors.splitlines() if line.startswith("|")]
    named = set(re.findall(r"`(?:Event\.)?(\w+)", "\n".join(cells)))
    assert members(protocol) - named == set()


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
