"""Which ready tensors travel together. This module never sends, sleeps or reads a clock."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from hvdlite.common.collectives.table import ROWS
from hvdlite.common.plain.adapter import numpy_dtype
from hvdlite.common.plain.messages import JOB_THRESHOLD, WHOLE_GROUP, Response


@dataclass
class _Open:
    """A segment that still has room."""

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
    segments: list[_Open] = []
    youngest: dict[Hashable, _Open] = {}
    for response in ready:
        kind = _kind(response, keep_groups)
        if kind is None:
            segments.append(_Open([response]))
            continue
        size = size_bytes(response)
        current = youngest.get(kind)
        if current is None or current.bytes + size > _limit_bytes(response, threshold_bytes):
            current = youngest[kind] = _Open([])
            segments.append(current)
        current.responses.append(response)
        current.bytes += size
    return [segment.responses for segment in segments]


def size_bytes(response: Response) -> int:
    """Size of the tensor as the threshold counts it."""
    request = response.request
    if not request.dtype:
        return 0
    return ROWS[request.collective].bytes(response, numpy_dtype(request.dtype).itemsize)


def _limit_bytes(response: Response, threshold_bytes: int) -> float:
    own = response.request.fusion_bytes
    if own == WHOLE_GROUP:
        return float("inf")
    return threshold_bytes if own == JOB_THRESHOLD else own


def _kind(response: Response, keep_groups: bool) -> Hashable | None:
    """What tensors of one segment have in common; None: never fused."""
    request = response.request
    if response.error or not ROWS[request.collective].fusable:
        return None
    apart = keep_groups or request.fusion_bytes == WHOLE_GROUP
    return (
        request.process_set_id,
        request.collective,
        request.dtype,
        request.device,
        request.reduce_op,
        request.prescale_factor,
        request.postscale_factor,
        request.fusion_bytes,
        request.group or request.name if apart else "",
    )
