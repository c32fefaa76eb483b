"""The name of the backend, and the devices whose tensors it takes."""

from __future__ import annotations

import torch
import torch.distributed as dist

BACKEND = "hvdlite"
URL = f"{BACKEND}://"


def devices() -> list[str]:
    """Return the device types of tensors: those that torch has a backend for, with streams.

    One that is not among them keeps its vendor's backend as the default.
    """
    known = dist.Backend.default_device_backend_map
    return ["cpu", "cuda", *(kind for kind in known if kind not in ("cpu", "cuda", "mps"))]


def is_available(kind: str) -> bool:
    """Return whether this process can use a device of an accelerator's type."""
    module = getattr(torch, kind, None)
    return module is not None and bool(module.is_available())
