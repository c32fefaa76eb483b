"""Allreduce between hosts: each algorithm against numpy, the choice by size, and lost members."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import PeerLostError
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.algorithms import ALGORITHMS, Choice
from hvdlite.common.collectives.between_hosts.costs import Model
from hvdlite.common.collectives.multi_host.backends import FlatBackend
from hvdlite.common.collectives.multi_host.hierarchical import HierarchicalBackend
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Transport
from tests.backends import (
    DTYPES,
    FEW_DTYPES,
    Program,
    all_members,
    noise,
    quiet,
    reductions_of,
    run_on_transports,
)
from tests.worlds import IN_PROCESS, TCP

SUM = Reduction(ReduceOp.SUM)
SCHEDULED = [name for name in ALGORITHMS if name != "ring"]
LAYERED = {
    "2+2": ((0, 1), (2, 3)),
    "3+1+2": ((0, 2, 5), (1,), (3, 4)),
    "2x5": ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)),
}


def flat(size: int) -> Topology:
    return Topology(tuple((rank,) for rank in range(size)))


def reduced(
    topology: Topology,
    sizes: Sequence[int],
    dtype: str,
    choice: str | Model,
    piece_bytes: int = 1 << 18,
    kind: str = IN_PROCESS,
    config: Config | None = None,
) -> list[tuple[list[Array], list[str]]]:
    """The results of an allreduce of noise on all ranks, and its phases."""

    def program(transport: Transport) -> tuple[list[Array], list[str]]:
        phases: list[str] = []

        def noted(phase: str) -> AbstractContextManager[object]:
            phases.append(phase)
            return nullcontext()

        members = all_members(transport)
        arrays = [noise(transport.rank, size, dtype) for size in sizes]
        backend = backend_for(transport, choice, piece_bytes)
        backend.allreduce(members, arrays, arrays, Reduction(ReduceOp.SUM, 0.5, 0.5), noted)
        return arrays, phases

    return run_on_transports(topology, program, kind, config)


def backend_for(transport: Transport, choice: str | Model, piece_bytes: int = 1 << 18) -> Any:
    """The backend between hosts with an algorithm, or with a choice by a model."""
    by = Choice(choice) if isinstance(choice, str) else Choice(model=choice)
    if len(transport.topology.hosts) == transport.topology.size:
        backend = FlatBackend(transport, by)
        backend.piece_bytes = piece_bytes
        return backend
    return HierarchicalBackend(transport, ShmBackend(transport), piece_bytes, by)


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("size", [2, 3, 6, 7, 8])
def test_every_dtype_and_op_on_any_number_of_hosts(name: str, size: int) -> None:
    def program(transport: Transport) -> None:
        p = Program.of(transport, allreduce=name)
        p.backends.retune("", 1024)
        for number, dtype in enumerate(DTYPES if size == 3 else FEW_DTYPES):
            for reduction in reductions_of(dtype):
                p.allreduce(dtype, (number, 301, 0, size), reduction)

    run_on_transports(flat(size), program)


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize(
    ("topology", "dtype"),
    [
        (Topology(LAYERED["3+1+2"]), "float32"),
        (Topology(LAYERED["3+1+2"]), "bfloat16"),
        (Topology(LAYERED["2x5"]), "float32"),
        (flat(6), "float32"),
    ],
    ids=["3+1+2", "3+1+2, 16 bits", "2x5", "flat"],
)
def test_no_bit_depends_on_pieces_fusion_rank_or_run(
    name: str, topology: Topology, dtype: str
) -> None:
    sizes = [7, 1000, 0, 5001]
    runs = [reduced(topology, sizes, dtype, name, piece) for piece in (1 << 18, 512, 512)]
    alone = [reduced(topology, [size], dtype, name)[0][0][0] for size in sizes]
    for run in runs:
        assert any(name.upper() in phase for phase in run[0][1])
        for arrays, _ in run:
            for array, wanted in zip(arrays, alone, strict=True):
                assert array.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("name", SCHEDULED)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_sums_are_rounded_once_by_each_host(name: str, dtype: str) -> None:
    hosts, size = 7, 5000
    result = reduced(flat(hosts), [size], dtype, name)[0][0][0]
    parts = [noise(rank, size, dtype).astype(np.float64) / 2 for rank in range(hosts)]
    exact = np.sum(parts, axis=0) / 2
    spacing, tiny = (2.0**-10, 2.0**-24) if dtype == "float16" else (2.0**-7, 2.0**-133)
    rounding = np.sum(np.abs(parts), axis=0) * spacing / 2 + tiny
    assert np.all(np.abs(result.astype(np.float64) - exact) <= hosts * rounding)


@pytest.mark.parametrize(("name", "streams"), [*zip(SCHEDULED, (1, 3, 3), strict=True)])
def test_over_tcp(name: str, streams: int) -> None:
    topology = Topology(LAYERED["3+1+2"])
    sizes, piece_bytes = [5, 400_000], 128 << 10  # Such pieces go over all streams in turns.
    in_process = reduced(topology, sizes, "float32", name, piece_bytes)
    config = Config(tcp_streams=streams)
    over_tcp = reduced(topology, sizes, "float32", name, piece_bytes, TCP, config)
    for (arrays, _), (wanted, _) in zip(over_tcp, in_process, strict=True):
        assert [array.tobytes() for array in arrays] == [array.tobytes() for array in wanted]


def test_a_tensor_has_its_own_algorithm_whatever_it_is_fused_with() -> None:
    # Far bytes and copies are dear, so that large tensors take the ring, and small ones doubling.
    model = Model(message=1e-3, byte=1e-6, far_byte=2e-6, copied_byte=1e-6)
    sizes = [3, 40_000, 11, 30_000]
    for topology in (flat(6), Topology(LAYERED["2x5"])):
        together = reduced(topology, sizes, "float32", model)
        phases = [phase for phase in together[0][1] if "DOUBLING" in phase or "RING" in phase]
        assert len(phases) == 2, phases
        for number, size in enumerate(sizes):
            alone, _ = reduced(topology, [size], "float32", model)[0]
            for arrays, _ in together:
                assert arrays[number].tobytes() == alone[0].tobytes()


@pytest.mark.parametrize("name", SCHEDULED)
def test_only_the_members_of_a_process_set_take_part(name: str) -> None:
    topology = Topology(((0, 1), (2, 3), (4, 5), (6,)))
    ranks = (1, 2, 4, 5, 6)

    def program(transport: Transport) -> None:
        if transport.rank in ranks:
            members = Members(ranks, ranks.index(transport.rank), topology.restrict(ranks))
            Program.of(transport, members, allreduce=name).allreduce("float64", [1000], SUM)

    run_on_transports(topology, program)


@pytest.mark.parametrize("kind", [IN_PROCESS, TCP])
@pytest.mark.parametrize("name", SCHEDULED)
def test_a_member_that_leaves_in_the_middle_is_named(name: str, kind: str) -> None:
    gone = 3

    def program(transport: Transport) -> BaseException | None:
        p = Program.of(transport, allreduce=name)
        array = noise(transport.rank, 100_000)
        for turn in range(3):
            if transport.rank == gone and turn == 2:
                return None  # It closes its transport.
            try:
                p.backend("allreduce", "float32").allreduce(p.members, [array], [array], SUM, quiet)
            except PeerLostError as error:
                return error
        return AssertionError("nobody has noticed")

    errors = run_on_transports(flat(5), program, kind)
    assert errors[gone] is None
    lost = [error for rank, error in enumerate(errors) if rank != gone]
    assert all(isinstance(error, PeerLostError) for error in lost), lost
    assert gone in {error.rank for error in lost}
