"""Small buckets as one short call: their tensors pass together through shared memory.

See [Note: short calls] in engine/short_calls.py. A step of a small model has one bucket, and the
training threads of all ranks wait for it at about the same time: they exchange it themselves. The
entries of its tensors are announced, and sent only where that has failed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgpack

from hvdlite.common.plain.entries import Bundle, Entry

# Larger ones are no short calls; nor are smaller ones among more than two ranks of which all data
# together are more than `MOST_TO_READ_BYTES`.
MOST_BYTES = 1 << 20


def bundle_of(entries: Sequence[Entry]) -> Bundle | None:
    """Return the bundle of these entries; None where they cannot be exchanged as one."""
    if len(entries) < 2 or not 0 < sum(entry.size_bytes for entry in entries) <= MOST_BYTES:
        return None
    if len({entry.request.dtype for entry in entries}) > 1:
        return None
    if any(entry.address is None for entry in entries):
        return None
    # Ranks may have their gradients in different orders.
    ordered = sorted(entries, key=lambda entry: entry.request.name)
    requests = [entry.request for entry in ordered]
    text = msgpack.packb(requests, unicode_errors="backslashreplace")
    request = requests[0]._replace(
        name=f"bundle.{hashlib.blake2b(text, digest_size=16).hexdigest()}",
        shape=(sum(entry.count for entry in ordered),),
        group="",
        group_size=0,
    )
    return Bundle(request, ordered)
