"""Sums of small tensors that go inside request and response, between hosts.

[Note: data inside requests]
A blocking allreduce of a few bytes between hosts is one way to rank 0 for its request, one way back
for the answer, and then the rounds of its data. Where the data is as small as the request, it goes
with it: rank 0 adds up what all ranks have sent, and the answer is the result. No round is left.

Whether that happens may depend on timing: a rank sends its data only with a tensor that is reported
alone, and rank 0 adds up only if all members have. So the sum must have the bits that recursive
doubling has, which is what reduces such tensors otherwise (`MOST_CARRIED` in costs.py): the members
of a host in their order, then the hosts by the same tree, rounded where they would be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array
from hvdlite.common.collectives.between_hosts.costs import MOST_CARRIED, MOST_CARRIED_BY_ALL
from hvdlite.common.collectives.between_hosts.schedules import doublings
from hvdlite.common.collectives.kernels import Arithmetic, convert
from hvdlite.common.collectives.table import SPECS, reduction_of
from hvdlite.common.requests.messages import Request
from hvdlite.common.tensors.adapter import HOST_DEVICE, numpy_dtype


def may_be_carried(request: Request, nbytes: int, topology: Topology) -> bool:
    """Return whether the data of a request may go with it; `topology` is that of the members."""
    return (
        0 < nbytes <= min(MOST_CARRIED, MOST_CARRIED_BY_ALL // topology.size)
        and len(topology.hosts) > 1
        and SPECS[request.collective].carried
        and request.device == HOST_DEVICE
        and not (request.parties or request.group)
    )


def add_up(
    request: Request, ranks: Sequence[int], topology: Topology, data: Mapping[int, bytes]
) -> bytes:
    """Return the sum of what the members `ranks` have sent; `topology` is theirs.

    Raises `ValueError` for data of another size than the request's.
    """
    dtype = numpy_dtype(request.dtype)
    parts = [np.frombuffer(data[rank], dtype) for rank in ranks]
    arithmetic = Arithmetic(dtype, reduction_of(request, len(ranks)))
    inner, outer = arithmetic.inner(), arithmetic.outer()
    sums = []
    for host in topology.hosts:
        total = np.empty(parts[0].size, inner.output_dtype)
        inner.reduce([parts[position] for position in host], total)
        sums.append(total)
    result = np.empty(parts[0].size, dtype)
    outer.store(result, _doubled(sums, outer))
    return result.tobytes()


def _doubled(sums: list[Array], arithmetic: Arithmetic) -> Array:
    """Return the sum over the hosts as `recursive_doubling` adds it up; changes `sums`."""
    extra = len(sums) - (1 << doublings(len(sums)))
    for host in range(extra):
        arithmetic.merge(sums[2 * host], _sent(sums[2 * host + 1], arithmetic))
    left = sums[: 2 * extra : 2] + sums[2 * extra :]
    while len(left) > 1:
        for first, second in zip(left[::2], left[1::2], strict=True):
            _sent(first, arithmetic)
            arithmetic.merge(first, _sent(second, arithmetic))
        left = left[::2]
    return left[0]


def _sent(sums: Array, arithmetic: Arithmetic) -> Array:
    """Round sums, in their place, as they are when they are sent."""
    if sums.dtype != arithmetic.output_dtype:
        body = np.empty(sums.size, arithmetic.output_dtype)
        convert(body, sums)
        convert(sums, body)
    return sums
