"""Fusion: which ready tensors are run together, as one segment.

One collective of many bytes takes less time than many small ones. This module never sends, sleeps
or reads a clock.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hvdlite.common.collectives.table import SPECS
from hvdlite.common.requests.messages import JOB_THRESHOLD, WHOLE_GROUP, Response
from hvdlite.common.tensors.adapter import numpy_dtype


@dataclass
class _OpenSegment:
    responses: list[Response]
    bytes: int = field(default=0)


def next_segments(
    ready: Sequence[Response], threshold_bytes: int, keep_groups: bool = False
) -> list[list[Response]]:
    """Cut `ready` (in the order of readiness) into segments of at most `threshold_bytes`.

    A tensor joins the youngest segment of its kind if it fits, also past others of another kind
    (look-ahead); a tensor above the threshold is a segment of its own. Segments are ordered by
    their first tensor. With `keep_groups`, a group is fused with nothing but itself.

    A request may have a limit of its own, or ask that its group is exactly one segment.
    """
    segments: list[_OpenSegment] = []
    youngest: dict[Hashable, _OpenSegment] = {}
    for response in ready:
        kind = _kind(response, keep_groups)
        if kind is None:
            segments.append(_OpenSegment([response]))
            continue
        size = size_bytes(response)
        limit: float = response.request.fusion_bytes
        if limit == WHOLE_GROUP:
            limit = float("inf")
        elif limit == JOB_THRESHOLD:
            limit = threshold_bytes
        current = youngest.get(kind)
        if current is None or current.bytes + size > limit:
            current = youngest[kind] = _OpenSegment([])
            segments.append(current)
        current.responses.append(response)
        current.bytes += size
    return [segment.responses for segment in segments]


def size_bytes(response: Response) -> int:
    """Return the size of the tensor as the threshold counts it."""
    request = response.request
    if not request.dtype:
        return 0
    return SPECS[request.collective].bytes(response, numpy_dtype(request.dtype).itemsize)


def _kind(response: Response, keep_groups: bool) -> Hashable | None:
    """Return what all tensors of a segment have in common; None if this one is never fused."""
    request = response.request
    if response.error or not SPECS[request.collective].fusable:
        return None
    apart = keep_groups or request.fusion_bytes == WHOLE_GROUP
    return (
        request.process_set_id,
        request.collective,
        request.dtype,
        request.device,
        request.reduce_op,
        request.root_rank,
        request.prescale_factor,
        request.postscale_factor,
        request.fusion_bytes,
        request.group or request.name if apart else "",
    )
