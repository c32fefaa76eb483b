"""The device modules of torch, such as ``torch.cuda``: streams, events, and what hvdlite needs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from hvdlite.common.devices.interface import Event


class Streams(Protocol):
    """The part of ``torch.cuda``, or of a module like it, that `StagedDevice` needs."""

    def Stream(self, device: Any) -> Any:  # noqa: N802
        """Return a new queue of work on `device`."""

    @property
    def Event(self) -> Callable[..., Any]:  # noqa: N802
        """The class of events. With ``blocking=True``, where it is known, threads sleep."""

    def current_stream(self, device: Any) -> Any:
        """Return the stream that the calling thread uses."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context in which the calling thread uses `stream`."""


def event_on(streams: Streams, stream: Any) -> Event:
    """Return an event after all work that is queued on a stream, for which threads sleep."""
    try:
        event = streams.Event(blocking=True)
    except TypeError:  # As torch.xpu: its threads always sleep.
        event = streams.Event()
    event.record(stream)
    return event  # type: ignore[no-any-return]


def accelerator_kind() -> str | None:
    """Return the device type of the accelerator that this process can use, None without one."""
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    if current is None:  # Before torch 2.6.
        return "cuda" if torch.cuda.is_available() else None
    accelerator = current()
    if accelerator is None or not torch.accelerator.is_available():
        return None
    return str(accelerator.type)


def streams_of(kind: str) -> Streams:
    """Return the device module of a torch device type, such as ``torch.cuda`` or ``torch.npu``.

    Raises `ValueError` where torch has none, or one without streams.
    """
    try:
        module: Any = torch.get_device_module(kind)
    except RuntimeError:
        module = None
    needed = "Stream", "Event", "current_stream", "stream"
    missing = [name for name in needed if not hasattr(module, name)]
    if missing:
        lacks = f"torch.{kind} has no {', '.join(missing)}" if module else f"no module torch.{kind}"
        raise ValueError(
            f"tensors on {kind!r} cannot be communicated, only those on cpu and on accelerators "
            f"with streams ({lacks}): move the tensor with tensor.cpu(), or import the "
            "vendor's package"
        )
    streams: Streams = module
    return streams


def pins(kind: str) -> bool:
    """Return whether torch pins host memory for this device type: of one type at a time.

    A copy from and to memory that is not pinned is right, and waits in the calling thread.
    """
    current = getattr(getattr(torch, "accelerator", None), "current_accelerator", None)
    if current is None:  # Before torch 2.6.
        return kind == "cuda"
    accelerator = current()
    return kind == "cuda" if accelerator is None else bool(accelerator.type == kind)
