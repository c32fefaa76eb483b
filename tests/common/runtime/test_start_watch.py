"""Who is missing at init, and which process is a rank: from what launchers say, without MPI."""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.runtime.launched_rank import (
    RANK_PROCESS,
    LaunchedRank,
    claim_rank,
    launched_rank,
)
from hvdlite.common.runtime.start_watch import StartWatch

OPENMPI = {
    "PMIX_NAMESPACE": "prterun-a-1@1",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SLURM = {"PMI_RANK": "3", "PMI_SIZE": "4", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (OPENMPI, LaunchedRank("prterun-a-1@1", 3, 4, 1, 2)),
        (MPICH, LaunchedRank("", 3, 4, 1, 2)),
        ({**MPICH, "HVDLITE_LAUNCHER_EVENTS": "token 3 /a b"}, LaunchedRank("token", 3, 4, 1, 2)),
        ({**SLURM, "SLURM_LOCALID": "0"}, LaunchedRank("7.0", 3, 4, 0, -1)),
        ({"SLURM_JOB_ID": "7", "HOME": "/"}, None),
    ],
)
def test_what_launchers_say(environ: dict[str, str], expected: LaunchedRank | None) -> None:
    assert launched_rank(environ) == expected


@pytest.mark.parametrize("own", [OPENMPI, MPICH, SLURM])
def test_a_copy_of_a_rank_is_refused_and_names_it(own: dict[str, str]) -> None:
    environ = dict(own)
    claim_rank(environ)
    claim_rank(environ)  # init after shutdown
    _, _, rest = environ[RANK_PROCESS].partition(" ")
    environ[RANK_PROCESS] = f"{os.getppid()} {rest}"  # as if the parent had claimed it
    with pytest.raises(HorovodInternalError, match=rf"rank 3 \(process {os.getppid()}\)") as info:
        claim_rank(environ)
    assert info.value.rank == 3


@pytest.mark.parametrize("own", [OPENMPI, MPICH, SLURM])
def test_a_job_inside_a_rank_is_a_job_of_its_own(own: dict[str, str]) -> None:
    environ = {**own, RANK_PROCESS: "1 3 the outer job"}
    claim_rank(environ)
    assert environ[RANK_PROCESS].startswith(f"{os.getpid()} 3")
    environ = {RANK_PROCESS: "1 3 the outer job"}  # one rank, without a launcher
    claim_rank(environ)
    assert environ == {RANK_PROCESS: "1 3 the outer job"}


def watches(size: int, local_size: int, ranks: dict[int, int]) -> list[StartWatch]:
    """The watches of ``rank -> local rank`` of one host."""
    job = secrets.token_hex(8)
    return [
        StartWatch(LaunchedRank(job, rank, size, local, local_size), 60)
        for rank, local in ranks.items()
    ]


@pytest.mark.parametrize(
    ("size", "local_size", "present", "text"),
    [
        (3, 3, {0: 0, 1: 1}, "rank 2 on this host"),
        (4, 4, {1: 1}, "ranks 0, 2, 3 on this host"),
        (4, 2, {0: 0}, "local rank 1 on this host"),
        (4, 2, {2: 0, 3: 1}, "of ranks 0, 1, on other hosts, at least one has not"),
        (2, 2, {0: 0, 1: 1}, "all ranks on this host"),
    ],
)
def test_who_is_missing(size: int, local_size: int, present: dict[int, int], text: str) -> None:
    with ExitStack() as init:
        for watch in [init.enter_context(watch) for watch in watches(size, local_size, present)]:
            error = str(watch.give_up())
            assert text in error and "the limit is 60 s: HVDLITE_START_TIMEOUT" in error, error


def test_a_job_that_has_no_name_says_so_without_ranks() -> None:
    with StartWatch(LaunchedRank("", 0, 2, 0, 2), 60) as watch:
        assert "some ranks have not called init()" in str(watch.give_up())


def test_ranks_of_another_job_do_not_count() -> None:
    (mine,), (theirs,) = watches(2, 2, {0: 0}), watches(2, 2, {1: 1})
    with theirs, mine:
        assert "rank 1 on this host" in str(mine.give_up())


def test_a_part_of_the_world_waits_for_its_own_ranks() -> None:
    (watch,) = watches(4, 4, {0: 0})
    with watch:
        watch.expected = [0, 3]
        assert ": rank 3 on this host" in str(watch.give_up())
