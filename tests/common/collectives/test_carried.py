"""Sums that rank 0 makes of what came inside requests: the bits of recursive doubling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Reduction
from hvdlite.common.collectives.between_hosts.carried import add_up, may_be_carried
from hvdlite.common.collectives.between_hosts.costs import (
    MOST_CARRIED,
    MOST_CARRIED_BY_ALL,
    Model,
    cheapest,
)
from hvdlite.common.requests.messages import Request
from hvdlite.common.tensors.adapter import HOST_DEVICE, numpy_dtype
from hvdlite.common.transport.base import Transport
from tests.backends import (
    DTYPES,
    FEW_DTYPES,
    all_members,
    noise,
    quiet,
    reductions_of,
    run_on_transports,
)
from tests.common.collectives.test_between_hosts import LAYERED, backend_for, flat

TOPOLOGIES = {
    **{name: Topology(hosts) for name, hosts in LAYERED.items()},
    **{f"flat {size}": flat(size) for size in range(2, 10)},
}
ELEMENTS = 37


def request_of(dtype: str, reduction: Reduction, **fields: Any) -> Request:
    return Request(
        0, "t", "allreduce", dtype, (ELEMENTS,), HOST_DEVICE, int(reduction.reduce_op),
        prescale_factor=reduction.prescale, postscale_factor=reduction.postscale, **fields,
    )  # fmt: skip


def values(rank: int, dtype: str) -> Array:
    """Values whose sums depend on the order, with infinities and NaNs of several signs."""
    found = noise(rank, ELEMENTS, "float64")
    if numpy_dtype(dtype).kind in "biu":
        return np.clip(found, -100 if dtype.startswith("int") else 0, 100).astype(dtype)
    found[rank % 5] = [np.inf, -np.inf, np.nan, -np.nan, 0.0][rank % 5]
    with np.errstate(over="ignore"):
        return found.astype(numpy_dtype(dtype))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_the_bits_are_those_of_the_data_plane(topology: Topology) -> None:
    dtypes = DTYPES if topology.size == 6 else FEW_DTYPES
    cases = [(dtype, reduction) for dtype in dtypes for reduction in reductions_of(dtype)]

    def program(transport: Transport) -> list[bytes]:
        members, backend = all_members(transport), backend_for(transport, "doubling")
        found = []
        for dtype, reduction in cases:
            array = values(transport.rank, dtype)
            backend.allreduce(members, [array], [array], reduction, quiet)
            found.append(array.tobytes())
        return found

    ranks = tuple(range(topology.size))
    for number, found in enumerate(zip(*run_on_transports(topology, program), strict=True)):
        dtype, reduction = cases[number]
        data = {rank: values(rank, dtype).tobytes() for rank in ranks}
        with np.errstate(all="ignore"):
            wanted = add_up(request_of(dtype, reduction), ranks, topology, data)
        assert set(found) == {wanted}, (dtype, reduction)


def test_an_average_is_that_of_all_members() -> None:
    request = request_of("float32", Reduction(ReduceOp.AVERAGE))
    data = {rank: np.full(ELEMENTS, rank, np.float32).tobytes() for rank in (2, 5, 7)}
    result = add_up(request, (2, 5, 7), Topology(((0, 1), (2,))), data)
    assert np.frombuffer(result, np.float32) == pytest.approx(14 / 3)


def test_data_of_another_size_is_refused() -> None:
    request = request_of("float32", Reduction(ReduceOp.SUM))
    data = {0: bytes(4 * ELEMENTS), 1: bytes(4 * ELEMENTS - 4)}
    with pytest.raises(ValueError, match=r"shape|broadcast"):
        add_up(request, (0, 1), flat(2), data)


def test_only_small_sums_between_hosts_are_carried() -> None:
    request = request_of("float32", Reduction(ReduceOp.SUM))
    assert may_be_carried(request, MOST_CARRIED, flat(2))
    assert not may_be_carried(request, MOST_CARRIED + 1, flat(2))
    assert not may_be_carried(request, 0, flat(2))
    assert not may_be_carried(request, 4, Topology.single_host(2))
    many = 2 * MOST_CARRIED_BY_ALL // MOST_CARRIED
    assert not may_be_carried(request, MOST_CARRIED, flat(many))
    assert may_be_carried(request, MOST_CARRIED // 2, flat(many))
    for other in (
        request._replace(collective="allgather"), request._replace(device="cuda:0"),
        request._replace(group="g"), request._replace(parties=(0, 1)),
    ):  # fmt: skip
        assert not may_be_carried(other, 4, flat(2))


@pytest.mark.parametrize("model", [Model(), Model(message=0.0, call=0.0)])
def test_what_may_be_carried_is_reduced_by_doubling_otherwise(model: Model) -> None:
    for hosts in (2, 3, 5, 8, 64, 2048):
        assert cheapest(model, hosts, 1, MOST_CARRIED) == "doubling"
