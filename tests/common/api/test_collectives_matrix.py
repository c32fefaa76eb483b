"""Every backend x collective x dtype x topology x size against numpy; ranks are threads."""

from __future__ import annotations

import pytest

from hvdlite.common.base.topology import Topology
from hvdlite.common.settings.config import Config
from hvdlite.common.transport.base import Transport
from tests.backends import DTYPES, FEW_DTYPES, Program, run_on_transports
from tests.worlds import TCP

HOSTS = {
    "1": ((0,),),
    "2": ((0, 1),),
    "3": ((0, 1, 2),),
    "5": (tuple(range(5)),),
    "8": (tuple(range(8)),),
    "2+2": ((0, 1), (2, 3)),
    "interleaved": ((0, 2), (1, 3, 4)),
    "3+1": ((0, 1, 2), (3,)),
    "1+2+3": ((0,), (1, 2), (3, 4, 5)),
    "1+1+1+1+1": ((0,), (1,), (2,), (3,), (4,)),
}
CASES = {
    ("1", "auto"): FEW_DTYPES,
    ("2", "auto"): DTYPES,
    ("3", "auto"): DTYPES,
    ("5", "auto"): FEW_DTYPES,
    ("8", "auto"): FEW_DTYPES,
    ("2", "python"): FEW_DTYPES,
    ("3", "python"): DTYPES,
    ("8", "python"): FEW_DTYPES,
    ("2", "ring"): FEW_DTYPES,
    ("3", "ring"): DTYPES,
    ("5", "ring"): FEW_DTYPES,
    ("2+2", "auto"): FEW_DTYPES,
    ("interleaved", "auto"): DTYPES,
    ("3+1", "auto"): FEW_DTYPES,
    ("1+2+3", "auto"): FEW_DTYPES,
    ("1+1+1+1+1", "auto"): FEW_DTYPES,
}


@pytest.mark.parametrize(
    ("hosts", "way", "dtype"), [(*case, dtype) for case in CASES for dtype in CASES[case]]
)
def test_every_collective_equals_numpy(hosts: str, way: str, dtype: str) -> None:
    topology = Topology(HOSTS[hosts])
    n = topology.size
    settings = {"native": "off"} if way == "python" else {"allreduce": way, "data_plane": way}

    def program(transport: Transport) -> None:
        Program.of(transport, **settings).everything(dtype, [0, 1, n - 1, n, n + 1, 101])

    run_on_transports(topology, program)


@pytest.mark.parametrize(
    ("hosts", "way", "dtype", "streams"),
    [
        ("2", "auto", "uint8", 1),
        ("3", "ring", "bfloat16", 3),
        ("2+2", "auto", "float64", 3),
        ("interleaved", "auto", "bfloat16", 3),
        ("3+1", "auto", "uint8", 1),
        ("1+2+3", "auto", "float64", 3),
        ("1+1+1+1+1", "auto", "uint8", 1),
        ("1+1+1+1+1", "auto", "bfloat16", 3),
    ],
)
def test_every_collective_over_tcp(hosts: str, way: str, dtype: str, streams: int) -> None:
    topology = Topology(HOSTS[hosts])
    sizes = [0, 1, topology.size + 1, 101, 200_000]

    def program(transport: Transport) -> None:
        Program.of(transport, allreduce=way, data_plane=way).everything(dtype, sizes)

    run_on_transports(topology, program, TCP, Config(tcp_streams=streams))


@pytest.mark.parametrize("size", [4, 6, 7])
def test_every_number_of_ranks(size: int) -> None:
    for way in ("auto", "ring"):
        run_on_transports(
            Topology.single_host(size),
            lambda t, way=way: Program.of(t, allreduce=way, data_plane=way).everything(
                "float32", [0, 1, size, 1009]
            ),
        )
