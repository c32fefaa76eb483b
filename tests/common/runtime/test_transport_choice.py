"""Over what a job that MPI has started is connected: what all ranks say, as a table."""

from __future__ import annotations

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.runtime.connect import Wish, choose_transport, wish_of
from hvdlite.common.settings.config import Config

FABRIC, ETHERNET = Wish("auto", "", True), Wish("auto", "", False)
COLLECTIVES = Wish("auto", "HVDLITE_ALLREDUCE=mpi", False)


@pytest.mark.parametrize(
    ("wishes", "expected"),
    [
        ([ETHERNET, ETHERNET], "tcp"),
        ([FABRIC, FABRIC], "mpi"),
        ([FABRIC, ETHERNET], "tcp"),
        ([ETHERNET, FABRIC], "tcp"),
        ([COLLECTIVES] * 3, "mpi"),
        ([Wish("tcp", "", True)] * 2, "tcp"),
        ([Wish("mpi", "", False)] * 2, "mpi"),
        ([ETHERNET], "tcp"),
    ],
)
def test_what_auto_means(wishes: list[Wish], expected: str) -> None:
    assert choose_transport(wishes) == expected


def test_ranks_that_disagree_are_named() -> None:
    with pytest.raises(ConfigError, match="HVDLITE_TRANSPORT: rank 0 has auto, rank 2 has mpi"):
        choose_transport([ETHERNET, FABRIC, Wish("mpi", "", False)])
    with pytest.raises(ConfigError, match="rank 0 has HVDLITE_ALLREDUCE=mpi, rank 1 has none"):
        choose_transport([COLLECTIVES, ETHERNET])


@pytest.mark.parametrize("setting", ["allreduce", "data_plane"])
def test_collectives_of_mpi_over_tcp_are_refused(setting: str) -> None:
    with pytest.raises(ConfigError, match="needs MPI between the ranks, and HVDLITE_TRANSPORT=tcp"):
        wish_of(Config(transport="tcp", **{setting: "mpi"}))  # type: ignore[arg-type]
