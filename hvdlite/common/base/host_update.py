"""How the set of hosts of an elastic job has changed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntFlag


class HostUpdateResult(IntFlag):
    """Kinds of a change of hosts; several changes are the union of their kinds."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


def compare_hosts(before: Mapping[str, int], after: Mapping[str, int]) -> HostUpdateResult:
    """Return the kind of the change from `before` to `after`, both slots by host name."""
    kind = HostUpdateResult.no_update
    if any(after.get(host, 0) < slots for host, slots in before.items()):
        kind |= HostUpdateResult.removed
    if any(before.get(host, 0) < slots for host, slots in after.items()):
        kind |= HostUpdateResult.added
    return kind
