"""The hierarchical allreduce with the compiled collectives inside hosts of several sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Reduction
from hvdlite.common.collectives.multi_host.hierarchical import BLOCK_PIECES, HierarchicalBackend
from hvdlite.common.collectives.native import collectives as native
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Transport
from tests.backends import all_members, quiet, run_on_transports
from tests.common.collectives.test_native_shm import FLOATS, found

pytestmark = pytest.mark.timeout(120)

Hosts = tuple[tuple[int, ...], ...]
LAYOUTS: dict[str, Hosts] = {
    "2+1+1": ((0, 1), (2,), (3,)),
    "3+2": ((0, 1, 2), (3, 4)),
    "2+3, in turns": ((0, 2), (1, 3, 4)),
    "1+3+2": ((0,), (1, 3, 5), (2, 4)),
    "2+2": ((0, 1), (2, 3)),
}
SMALL_PIECE = 64  # bytes


@cache  # Every rank asks for those of all others.
def whole_numbers(rank: int, size: int) -> Array:
    """Return numbers whose sum over a few ranks is exact in every type."""
    return np.resize(np.random.default_rng([rank, size]).integers(-20, 21, 4099), size)


def check(hosts: Hosts, dtype: str, segments: Sequence[Sequence[int]], piece_bytes: int) -> None:
    """Sum segments of tensors, in place and not; compare every element with numpy's sum."""
    here = found()
    ranks = sorted(rank for host in hosts for rank in host)

    def program(transport: Transport) -> None:
        shm = ShmBackend(transport, here)
        backend = HierarchicalBackend(transport, shm, piece_bytes)
        members = all_members(transport)
        for number, sizes in enumerate(segments):
            numbers = [whole_numbers(transport.rank, size) for size in sizes]
            inputs = [each.astype(numpy_dtype(dtype)) for each in numbers]
            outputs = inputs if number % 2 else [np.full_like(each, 99) for each in inputs]
            backend.allreduce(members, inputs, outputs, Reduction(ReduceOp.SUM), quiet)
            given = [np.concatenate([whole_numbers(rank, n) for n in sizes]) for rank in ranks]
            found = np.concatenate(outputs).astype(np.int64)
            np.testing.assert_array_equal(found, np.sum(given, 0), str(sizes))
        # No rank has fallen back to Python where its host has several.
        peers = transport.topology.peers(transport.rank)
        assert list(shm._agreed.values()) == [True] * (len(peers) > 1)

    run_on_transports(Topology(hosts), program)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hosts", LAYOUTS.values(), ids=LAYOUTS)
def test_sums_around_the_borders_of_blocks(hosts: Hosts, dtype: str) -> None:
    """Views of tensors are reduced into rows of a block, and gathered from them."""
    piece = SMALL_PIECE // numpy_dtype(dtype).itemsize
    block = BLOCK_PIECES * piece * min(map(len, hosts)) * len(hosts)
    alone = [[block - 1], [block], [block + 1], [2 * block + piece], [3 * block - 1]]
    fused = [[7, 1, 0, 3 * block + 1, 5, block - 1], [1] * (block + 3), [0, block, block]]
    check(hosts, dtype, [*alone, *fused], SMALL_PIECE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["2+1+1", "3+2"])
def test_sums_around_the_borders_of_compiled_pieces(
    name: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One phase after the other, and blocks of more bytes than a slot holds."""
    piece_bytes = 8 << 10
    monkeypatch.setattr(native, "PIECE_BYTES", piece_bytes)
    piece = piece_bytes // numpy_dtype(dtype).itemsize
    sizes = [piece - 1, 2 * piece + 1, native.SLOTS * piece + 1]
    check(LAYOUTS[name], dtype, [[size] for size in sizes], 16 * piece_bytes)
    check(LAYOUTS[name], dtype, [[5, 2 * native.SLOTS * piece + 1, 3]], piece_bytes)
