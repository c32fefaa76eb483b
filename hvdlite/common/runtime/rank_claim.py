"""Which process is the rank: a child process inherits the variables of its launcher, too."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.meeting.launch import SINGLE, Launch

RANK_PROCESS = "HVDLITE_RANK_PROCESS"  # "<process id> <rank> <job>" of the process that is the rank


def claim_rank(launch: Launch, environ: MutableMapping[str, str] = os.environ) -> None:
    """Make this process the rank that it was launched as, for all processes that it starts.

    A child process inherits the launcher's variables, and would be a second copy of the rank.
    Raises `HorovodInternalError` in such a child. A job that is started inside a rank has other
    variables, and is a job of its own.
    """
    if launch.source == SINGLE:
        return
    process, _, rest = environ.get(RANK_PROCESS, "").partition(" ")
    rank, _, job = rest.partition(" ")
    # Where a launcher gives its jobs no name, only a direct child is known to be of the same job.
    same_job = job == launch.job and (job or process == str(os.getppid()))
    if same_job and rank == str(launch.rank) and process != str(os.getpid()):
        raise HorovodInternalError(
            f"process {os.getpid()} was started by rank {rank} (process {process}) and is no rank "
            "itself: it must not call init(). Where the child imports the script again (the "
            'methods "spawn" and "forkserver" of multiprocessing, as in a DataLoader), put init() '
            'and the training under: if __name__ == "__main__". To run a job of its own in the '
            "child, start it with hvdlite-run or hvdlite.run",
            int(rank),
        )
    environ[RANK_PROCESS] = f"{os.getpid()} {launch.rank} {launch.job}"
