"""What the matrix of the backends does not show: order of summation, Adasum, choice, size."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import EntryPoint
from typing import Any

import numpy as np
import pytest

from hvdlite.common.base.errors import (
    ConfigError,
    HorovodInternalError,
    PeerLostError,
    ProtocolError,
)
from hvdlite.common.base.reduce_op import ReduceOp
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives import backend_choice as select
from hvdlite.common.collectives.adasum import combine
from hvdlite.common.collectives.backend_choice import build_backends, choose
from hvdlite.common.collectives.base import Array, Members, Reduction
from hvdlite.common.collectives.between_hosts.ring import RingBackend
from hvdlite.common.collectives.kernels import Arithmetic, Casts, register_casts
from hvdlite.common.collectives.multi_host.hierarchical import HierarchicalBackend
from hvdlite.common.collectives.shm import ShmBackend
from hvdlite.common.settings.config import Config
from hvdlite.common.tensors.adapter import numpy_dtype
from hvdlite.common.transport.base import Transport
from hvdlite.common.transport.inprocess import InProcessWorld, solo
from tests.backends import Program, all_members, noise, quiet, run_on_transports

SUM = Reduction(ReduceOp.SUM)
TOPOLOGIES = {
    "one host": Topology.single_host(3),
    "flat": Topology(((0,), (1,), (2,))),
    "uneven": Topology(((0, 2, 4), (1, 3))),
}


def reduce_all(topology: Topology, sizes: list[int], dtype: str, reduction: Reduction) -> Any:
    """The results of one allreduce of noise on all ranks."""

    def program(transport: Transport) -> list[Array]:
        p = Program.of(transport)
        arrays = [noise(transport.rank, size, dtype) for size in sizes]
        backend = p.backend("allreduce", dtype, reduction.reduce_op)
        backend.allreduce(p.members, arrays, arrays, reduction, quiet)
        return arrays

    return run_on_transports(topology, program)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_no_bit_depends_on_rank_timing_or_fusion(name: str, dtype: str) -> None:
    sizes = [7, 1000, 1, 0, 70_001]
    together = reduce_all(TOPOLOGIES[name], sizes, dtype, SUM)
    again = reduce_all(TOPOLOGIES[name], sizes, dtype, SUM)
    alone = [reduce_all(TOPOLOGIES[name], [size], dtype, SUM)[0][0] for size in sizes]
    for rank, result in enumerate(together):
        for tensor, array in enumerate(result):
            bits = array.tobytes()
            assert bits == together[0][tensor].tobytes(), f"rank {rank} differs"
            assert bits == again[rank][tensor].tobytes(), "two runs differ"
            assert bits == alone[tensor].tobytes(), "fusion matters"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", TOPOLOGIES)
def test_16_bit_sums_are_rounded_once_for_each_host(name: str, dtype: str) -> None:
    hosts = TOPOLOGIES[name].hosts
    size, prescale, postscale = 5000, 0.1, 3.0
    result = reduce_all(
        TOPOLOGIES[name], [size], dtype, Reduction(ReduceOp.SUM, prescale, postscale)
    )[0][0]
    sums = [sum(noise(r, size, dtype).astype(np.float64) for r in host) for host in hosts]
    exact = np.sum(sums, axis=0) * prescale * postscale
    spacing, tiny = (2.0**-10, 2.0**-24) if dtype == "float16" else (2.0**-7, 2.0**-133)
    # Half a unit for each rounding; what is rounded is at most the sum of all hosts' magnitudes.
    most = np.abs(exact) if len(hosts) == 1 else np.sum(np.abs(sums), axis=0) * prescale * postscale
    rounding = most * spacing / 2 + tiny * postscale / 2
    widest = np.max([np.abs(noise(r, size, dtype)) for host in hosts for r in host], axis=0)
    float32 = widest.astype(np.float64) * prescale * postscale * 2.0**-20
    error = np.abs(result.astype(np.float64) - exact)
    assert np.all(error <= len(hosts) * rounding + float32)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "hosts", [((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0, 2, 5), (1, 3), (4, 6))], ids=str
)
@pytest.mark.parametrize("sizes", [[7, 1000, 0, 1, 5003], [2 * 2 * 16 * 20 + 1]], ids=str)
def test_blocks_change_no_bit_of_a_hierarchical_allreduce(
    hosts: Any, sizes: list[int], dtype: str
) -> None:
    # In the second case one of two slices has a piece of 16 elements more than the other.
    topology = Topology(hosts)
    reduction = Reduction(ReduceOp.SUM, 0.5, 0.5)

    def program(transport: Transport, piece_bytes: int) -> tuple[list[Array], list[str]]:
        phases: list[str] = []

        def noted(phase: str) -> AbstractContextManager[object]:
            phases.append(phase)
            return nullcontext()

        arrays = [noise(transport.rank, size, dtype) for size in sizes]
        backend = HierarchicalBackend(transport, ShmBackend(transport), piece_bytes)
        backend.allreduce(all_members(transport), arrays, arrays, reduction, noted)
        return arrays, phases

    at_once = run_on_transports(topology, lambda transport: program(transport, 1 << 20))
    in_blocks = run_on_transports(topology, lambda transport: program(transport, 64))
    for (arrays, phases), (expected, whole) in zip(in_blocks, at_once, strict=True):
        assert phases.count("SHM_ALLGATHER") >= 2 * whole.count("SHM_ALLGATHER") == 2
        for array, wanted in zip(arrays, expected, strict=True):
            assert array.tobytes() == wanted.tobytes()


def adasum_oracle(vectors: list[Array]) -> Array:
    """The tree of the documentation, in float64."""
    power = 1 << (len(vectors).bit_length() - 1)
    level = vectors[:power]
    for extra, vector in enumerate(vectors[power:]):
        level[extra] = adasum_pair(level[extra], vector)
    while len(level) > 1:
        level = [adasum_pair(level[i], level[i + 1]) for i in range(0, len(level), 2)]
    return level[0]


def adasum_pair(a: Array, b: Array) -> Array:
    """Two vectors combined."""
    dot, aa, bb = a @ b, a @ a, b @ b
    return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("hosts", [((0, 1),), ((0, 1, 2),), ((0, 1), (2, 3)), (tuple(range(7)),)])
def test_adasum_for_any_number_of_ranks(hosts: Any, dtype: str) -> None:
    sizes = [1, 0, 40_001, 3]
    topology = Topology(hosts)
    reduction = Reduction(ReduceOp.ADASUM, 0.5, 2.0)
    results = reduce_all(topology, sizes, dtype, reduction)
    for tensor, size in enumerate(sizes):
        parts = [noise(r, size, dtype).astype(np.float64) * 0.5 for r in range(topology.size)]
        wanted = adasum_oracle(parts) * 2.0
        tolerance = {"float64": 1e-11, "float32": 1e-5, "float16": 1e-3}.get(dtype, 1e-2)
        scale = np.abs(wanted).max(initial=0) * tolerance * 1e-3
        for result in results:
            got = result[tensor].astype(np.float64)
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=scale)
            assert result[tensor].tobytes() == results[0][tensor].tobytes()


def test_adasum_of_parallel_and_of_zero_vectors() -> None:
    def program(transport: Transport) -> list[Array]:
        p = Program.of(transport)
        same, one_zero = np.full(4, 3.0), np.full(4, float(transport.rank))
        backend = p.backend("allreduce", "float64", ReduceOp.ADASUM)
        arrays = [same, one_zero]
        backend.allreduce(p.members, arrays, arrays, Reduction(ReduceOp.ADASUM), quiet)
        return arrays

    same, one_zero = run_on_transports(Topology.single_host(2), program)[0]
    assert same.tolist() == [3.0] * 4  # of equals: one of them
    assert one_zero.tolist() == [1.0] * 4


def test_integers_are_scaled_in_float64_and_truncated_toward_zero() -> None:
    output = np.zeros(2, np.int32)
    parts = [np.array([-7, 7], np.int32), np.array([0, 2**30], np.int32)]
    Arithmetic(output.dtype, Reduction(ReduceOp.SUM, 1.0, 0.5)).reduce(parts, output)
    assert output.tolist() == [-3, 3 + 2**29]


def test_an_adapter_can_bring_faster_casts() -> None:
    calls: list[str] = []

    def counted(destination: Array, source: Array) -> None:
        calls.append(source.dtype.name)
        np.copyto(destination, source, casting="unsafe")

    register_casts("float16", Casts(counted, counted))
    try:
        parts = [np.ones(3, np.float16)] * 2
        output = np.zeros(3, np.float16)
        Arithmetic(output.dtype, SUM).reduce(parts, output)
    finally:
        register_casts("float16", Casts())
    assert output.tolist() == [2, 2, 2]
    assert calls == ["float16", "float16", "float32"]
    with pytest.raises(ValueError, match="float64"):
        register_casts("float64", Casts())


# -- the choice


def name_of(topology: Topology, collective: str, dtype: str = "float32", **settings: Any) -> str:
    transport = InProcessWorld(topology).transport(0)
    backends = build_backends(transport, Config(**settings))
    members = Members(tuple(range(topology.size)), 0, topology)
    return choose(backends, collective, numpy_dtype(dtype), ReduceOp.SUM, members).name


@pytest.mark.parametrize(
    ("topology", "settings", "allreduce", "allgather"),
    [
        (Topology.single_host(1), {}, "SINGLE", "SINGLE"),
        (Topology.single_host(1), {"allreduce": "mpi"}, "SINGLE", "SINGLE"),
        (Topology.single_host(2), {}, "SHM", "SHM"),
        (Topology.single_host(2), {"allreduce": "hierarchical"}, "SHM", "SHM"),
        (Topology.single_host(2), {"allreduce": "ring"}, "RING", "SHM"),
        (Topology.single_host(2), {"data_plane": "ring"}, "SHM", "RING"),
        (Topology(((0,), (1,))), {}, "FLAT", "RING"),
        (Topology(((0,), (1,))), {"allreduce": "ring"}, "RING", "RING"),
        (Topology(((0, 1), (2,))), {}, "HIERARCHICAL", "HIERARCHICAL"),
        (Topology(((0, 1), (2,))), {"allreduce": "ring"}, "RING", "HIERARCHICAL"),
        (Topology(((0, 1), (2,))), {"data_plane": "ring"}, "HIERARCHICAL", "RING"),
        (Topology(((0,), (1,), (2,))), {}, "FLAT", "FLAT"),
        (Topology(((0,), (1,), (2,))), {"allreduce": "trees"}, "FLAT", "FLAT"),
        (Topology(((0, 1), (2,))), {"allreduce": "halving"}, "HIERARCHICAL", "HIERARCHICAL"),
        (Topology.single_host(2), {"allreduce": "doubling"}, "SHM", "SHM"),
    ],
)
def test_choice(
    topology: Topology, settings: dict[str, str], allreduce: str, allgather: str
) -> None:
    assert name_of(topology, "allreduce", **settings) == allreduce
    assert name_of(topology, "allgather", **settings) == allgather


def test_shared_memory_cannot_be_forced_over_hosts() -> None:
    with pytest.raises(HorovodInternalError, match=r"HVDLITE_ALLREDUCE=shm.*2 hosts"):
        name_of(Topology(((0,), (1,))), "allreduce", allreduce="shm")
    with pytest.raises(HorovodInternalError, match=r"HVDLITE_DATA_PLANE=shm.*2 hosts"):
        name_of(Topology(((0,), (1,))), "broadcast", data_plane="shm")


def test_mpi_cannot_be_forced_without_mpi() -> None:
    with pytest.raises(ConfigError, match="HVDLITE_DATA_PLANE=mpi"):
        name_of(Topology.single_host(2), "broadcast", data_plane="mpi")


class Foreign:
    """A third party's backend for one dtype."""

    name = "FOREIGN"

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def supports(self, collective: str, dtype: Any, reduce_op: ReduceOp, members: Members) -> bool:
        """Only float64."""
        return dtype == np.float64


def test_backends_of_third_parties_are_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("foreign", f"{__name__}:Foreign", select.ENTRY_POINTS)
    monkeypatch.setattr(select, "installed_entry_points", lambda: [point])
    assert name_of(Topology.single_host(2), "allreduce", "float64") == "FOREIGN"
    assert name_of(Topology.single_host(2), "allreduce", "float32") == "SHM"
    broken = EntryPoint("broken", "no_such_module:factory", select.ENTRY_POINTS)
    monkeypatch.setattr(select, "installed_entry_points", lambda: [broken])
    with pytest.raises(HorovodInternalError, match=r"'broken'.*no_such_module"):
        build_backends(solo(), Config())


def test_entry_points_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that goes from world to world builds backends again and again."""
    searched: list[str] = []

    def search(group: str) -> list[EntryPoint]:
        searched.append(group)
        return []

    monkeypatch.setattr(select, "entry_points", search)
    select.installed_entry_points.cache_clear()
    try:
        for _ in range(3):
            build_backends(solo(), Config())
    finally:
        select.installed_entry_points.cache_clear()
    assert searched == [select.ENTRY_POINTS]


# -- failures and size


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_a_member_that_leaves_is_named(topology: Topology) -> None:
    gone = topology.size - 1

    def program(transport: Transport) -> BaseException | None:
        if transport.rank == gone:
            return None  # closes its transport
        p = Program.of(transport)
        array = noise(transport.rank, 1000)
        try:
            p.backend("allreduce", "float32").allreduce(p.members, [array], [array], SUM, quiet)
        except PeerLostError as error:
            return error
        return None

    errors = run_on_transports(topology, program)
    assert gone in {error.rank for error in errors if error is not None}


def test_members_that_disagree_on_sizes_fail() -> None:
    def program(transport: Transport) -> None:
        p = Program.of(transport, allreduce="ring")
        array = noise(0, 100 + transport.rank)
        p.backend("allreduce", "float32").allreduce(p.members, [array], [array], SUM, quiet)

    with pytest.raises((ProtocolError, PeerLostError)):
        run_on_transports(Topology.single_host(2), program)


def available_bytes() -> int:
    """Memory that programs may still have."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return int(fields["MemAvailable"].split()[0]) * 1024


def test_a_tensor_beyond_2_to_the_31_bytes() -> None:
    size = 2**31 + 7
    if available_bytes() < 3 * size:
        pytest.skip("needs 6.5 GB of memory")

    def program(transport: Transport) -> None:
        members = all_members(transport)
        array = np.full(size, 50, np.uint8)
        array[-1] = transport.rank
        for backend in (ShmBackend(transport), RingBackend(transport)):
            backend.allreduce(members, [array], [array], SUM, quiet)
        assert array[-1] == 2
        assert array[:-1].min() == array[:-1].max() == 200

    run_on_transports(Topology.single_host(2), program)


def test_adasum_of_an_infinity_does_not_warn() -> None:
    """Loss scaling overflows now and then; where warnings are errors, the engine would end."""
    for value in (np.inf, 1e200):  # The square of the second is an infinity.
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            combine(np.array([value, 1.0]), np.array([1.0, value]))
