"""What rank 0 logs during `RayExecutor.run`, for the callbacks of the driver."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hvdlite.common.runtime.current import find

__all__ = ["log"]

_queue: Any = None  # the ray.util.queue.Queue of the call that runs; None where nobody listens
_elastic = False  # Every rank has the queue, since any may become rank 0.


def configure(queue: Any, elastic: bool = False) -> None:
    """Send what is logged to `queue`; None ends it."""
    global _queue, _elastic
    _queue, _elastic = queue, elastic


def log(info_dict: Mapping[str, Any]) -> None:
    """Hand `info_dict` to every callback of the driver; other ranks than rank 0 log nothing."""
    if _queue is not None and not (_elastic and _rank()):
        _queue.put(info_dict)


def _rank() -> int:
    """Return the present rank, or the one at the start before ``init()``."""
    runtime = find()
    return int(os.environ.get("HVDLITE_RANK", "0")) if runtime is None else runtime.rank
