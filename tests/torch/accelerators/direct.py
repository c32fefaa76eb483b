"""Ranks whose tensors on the CPU take the way of an accelerator, and are counted on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hvdlite.common.api.forms import Forms
from hvdlite.common.runtime.current import current
from hvdlite.common.settings.config import Config
from hvdlite.torch.accelerators.context import HostStreams
from hvdlite.torch.adapter import TorchAdapter
from hvdlite.torch.autograd import TorchRunner
from hvdlite.torch.devices import HOST_AS_DEVICE, StagedDevice, runs_on_device
from hvdlite.torch.mpi_ops import runner
from tests.ranks import run_ranks

GLOO = Config(devices="gloo")


class CountingDevice(StagedDevice):
    """A device that counts tensors that pass through memory of the host."""

    def __init__(self, name: str = HOST_AS_DEVICE, streams: Any = None) -> None:
        self.staged = 0
        super().__init__(name, streams or HostStreams(), pin=False, is_direct=runs_on_device)

    def staging(self, tensor: torch.Tensor) -> torch.Tensor:
        self.staged += 1
        return super().staging(tensor)


Main = Callable[[int, Forms[torch.Tensor], CountingDevice], Any]


def on_devices(size: int, main: Main, config: Config = GLOO, **options: Any) -> list[Any]:
    """Run ``main(rank, forms, device)`` on every rank; return the results."""

    def body(rank: int) -> Any:
        device = CountingDevice()
        current()._agree([], None)  # As init does, after which all know the order of rank 0.
        return main(rank, Forms(TorchRunner(TorchAdapter(lambda kind: device))), device)

    return run_ranks(size, body, config=config, **options)


def take_the_way_of_a_device(monkeypatch: pytest.MonkeyPatch, device: CountingDevice) -> None:
    """Let all of hvdlite.torch find this device for tensors on the CPU."""
    adapter = runner.adapter
    monkeypatch.setattr(adapter, "_find", lambda kind: device)
    monkeypatch.setattr(adapter, "_host", device)
    monkeypatch.setattr(adapter, "_host_is_memory", False)
