"""The devices of tensors, by torch's device types: the host, and accelerators."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch

from hvdlite.common.plain.adapter import HOST_DEVICE, HostBuffer
from hvdlite.common.runtime.state import find
from hvdlite.torch.device_modules import pins, streams_of
from hvdlite.torch.host_device import HostDevice
from hvdlite.torch.staged_device import StagedDevice


class Device(Protocol):
    """One kind of device; its methods get strided tensors only."""

    name: str  # Ranks compare it, as all must have a tensor on the same kind of device.

    def input(self, tensor: torch.Tensor) -> HostBuffer:
        """Return the values of `tensor`, which is not lazily conjugated. Calling thread."""

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return a new tensor of the dtype and on the device of `like`. Any thread."""

    def output(self, tensor: torch.Tensor) -> HostBuffer:
        """Return a buffer that `commit` copies into `tensor`, of any strides. Any thread."""

    def finish(self, tensor: torch.Tensor) -> None:
        """Order the caller's next use of `tensor` behind `commit`. Calling thread."""


def runs_on_device(kind: str) -> bool:
    """Return whether libraries run collectives on this kind of device in the caller's job."""
    runtime = find()
    return runtime is not None and kind in runtime.engine.devices.agreement.kinds


HOST_AS_DEVICE = "host"  # The kind of tensors on the CPU that take the way of an accelerator.


def find_device(kind: str) -> Device:
    """Return the device for a torch device type. Raises `ValueError` for unsupported types."""
    if kind == HOST_DEVICE:
        if os.environ.get("HVDLITE_DEVICES", "") != "gloo":  # `init` checks the setting.
            return HostDevice()
        from hvdlite.torch.accelerators.host_streams import HostStreams

        host: Any = HostStreams()
        return StagedDevice(HOST_AS_DEVICE, host, pin=False, is_direct=runs_on_device)
    return StagedDevice(kind, streams_of(kind), pin=pins(kind), is_direct=runs_on_device)
