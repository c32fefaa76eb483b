"""What rank 0 logs during `RayExecutor.run`, for the callbacks of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["log"]

_queue: Any = None  # the ray.util.queue.Queue of the call that runs; None where nobody listens


def configure(queue: Any) -> None:
    """Send what is logged to `queue`; None ends it."""
    global _queue  # noqa: PLW0603
    _queue = queue


def log(info_dict: Mapping[str, Any]) -> None:
    """Hand `info_dict` to every callback of the driver; other ranks than rank 0 log nothing."""
    if _queue is not None:
        _queue.put(info_dict)
