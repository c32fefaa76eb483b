"""Requests and coordinators with defaults, for the tests of this package."""

from __future__ import annotations

from hvdlite.common.decisions.coordinator import Coordinator
from hvdlite.common.requests.messages import Request


def request(name: str, length: int = 4, **fields: object) -> Request:
    """Make an allreduce request of `length` float32 elements; `fields` replace its defaults."""
    base = Request(0, name, "allreduce", "float32", (length,), "cpu")
    return base._replace(**fields)  # type: ignore[arg-type]


def new_coordinator(size: int, **options: int) -> Coordinator:
    """Make a coordinator with a cache of 64 tensors and a threshold of 1 MiB by default."""
    return Coordinator(size, **{"cache_capacity": 64, "threshold_bytes": 1 << 20, **options})
