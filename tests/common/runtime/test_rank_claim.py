"""Which process is a rank: the children of a rank are none."""

from __future__ import annotations

import os

import pytest

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.meeting.detection import detect
from hvdlite.common.runtime.lifecycle import RANK_PROCESS, claim_rank
from tests.common.meeting.environments import (
    MASTER,
    MPICH,
    OPENMPI,
    OWN,
    SLURM_PMI,
    SRUN,
    TORCHRUN,
)

ENVIRONMENTS = [OPENMPI, MPICH, SLURM_PMI, OWN, TORCHRUN, MASTER, SRUN]


def claim(environ: dict[str, str]) -> None:
    claim_rank(detect(environ), environ)


@pytest.mark.parametrize("own", ENVIRONMENTS)
def test_a_copy_of_a_rank_is_refused_and_names_it(own: dict[str, str]) -> None:
    environ = dict(own)
    claim(environ)
    claim(environ)  # init after shutdown
    _, _, rest = environ[RANK_PROCESS].partition(" ")
    environ[RANK_PROCESS] = f"{os.getppid()} {rest}"  # as if the parent had claimed it
    with pytest.raises(HorovodInternalError, match=rf"rank 3 \(process {os.getppid()}\)") as info:
        claim(environ)
    assert info.value.rank == 3


@pytest.mark.parametrize("own", ENVIRONMENTS)
def test_a_job_inside_a_rank_is_a_job_of_its_own(own: dict[str, str]) -> None:
    environ = {**own, RANK_PROCESS: "1 3 the outer job"}
    claim(environ)
    assert environ[RANK_PROCESS].startswith(f"{os.getpid()} 3")
    environ = {RANK_PROCESS: "1 3 the outer job"}  # one rank, without a launcher
    claim(environ)
    assert environ == {RANK_PROCESS: "1 3 the outer job"}


def test_a_restart_by_torchrun_is_a_job_of_its_own() -> None:
    environ = dict(TORCHRUN)
    claim(environ)
    _, _, rest = environ[RANK_PROCESS].partition(" ")
    environ |= {RANK_PROCESS: f"1 {rest}", "TORCHELASTIC_RESTART_COUNT": "2"}
    claim(environ)
    assert environ[RANK_PROCESS].startswith(f"{os.getpid()} 3")
