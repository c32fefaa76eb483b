"""Which rank of which job this process is, by the environment of its launcher, without MPI."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError

LAUNCHED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID")
_LOCAL_SIZES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
_EVENTS = "HVDLITE_LAUNCHER_EVENTS"
RANK_PROCESS = "HVDLITE_RANK_PROCESS"  # "<process id> <rank> <job>" of the process that is the rank


class LaunchedRank(NamedTuple):
    """A rank as its launcher describes it; -1 and "" stand for what the launcher leaves out."""

    job: str  # Tells jobs apart that run at the same time; equal on all ranks of a job.
    rank: int
    size: int
    local_rank: int
    local_size: int


def was_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this process as a rank."""
    return any(name in environ for name in LAUNCHED)


def launched_rank(environ: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """Return the rank that a launcher has made of this process, or None without a launcher."""
    if not was_launched(environ):
        return None
    numbers = (_number(environ, names) for names in (_RANKS, SIZES, _LOCAL_RANKS, _LOCAL_SIZES))
    return LaunchedRank(_job(environ), *numbers)


def _job(environ: Mapping[str, str]) -> str:
    if "PMIX_NAMESPACE" in environ:
        return environ["PMIX_NAMESPACE"]
    if "PMI_RANK" in environ and "SLURM_STEP_ID" in environ:
        return f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    return environ.get(_EVENTS, "").partition(" ")[0]  # the token of hvdlite-run


def _number(environ: Mapping[str, str], names: tuple[str, ...]) -> int:
    values = (environ[name] for name in names if environ.get(name, "").isdecimal())
    return int(next(values, "-1"))


def claim_rank(environ: MutableMapping[str, str] = os.environ) -> None:
    """Make this process the rank that it was launched as, for all processes that it starts.

    A child process inherits the launcher's variables, and would be a second copy of the rank.
    Raises `HorovodInternalError` in such a child. A job that is started inside a rank has other
    variables, and is a job of its own.
    """
    me = launched_rank(environ)
    if me is None:
        return
    process, _, rest = environ.get(RANK_PROCESS, "").partition(" ")
    rank, _, job = rest.partition(" ")
    # Where a launcher gives its jobs no name, only a direct child is known to be of the same job.
    same_job = job == me.job and (job or process == str(os.getppid()))
    if same_job and rank == str(me.rank) and process != str(os.getpid()):
        raise HorovodInternalError(
            f"process {os.getpid()} was started by rank {rank} (process {process}) and is no rank "
            "itself: it must not call init(). Where the child imports the script again (the "
            'methods "spawn" and "forkserver" of multiprocessing, as in a DataLoader), put init() '
            'and the training under: if __name__ == "__main__". To run a job of its own in the '
            "child, start it with hvdlite-run or hvdlite.run",
            int(rank),
        )
    environ[RANK_PROCESS] = f"{os.getpid()} {me.rank} {me.job}"
