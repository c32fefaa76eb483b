"""Jobs of ranks that are forked from one process: fork_ranks SIZE [SIZE ...] [killed]

The modules of torch for sharding take seconds to import, and so would each rank. The exit code is
that of the first rank that failed.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Callable

from hvdlite.launcher.processes.signals import die_with_parent
from tests.parallel.process_group import killed, worker
from tests.ports import LOOPBACK, free_port

KILLED = "killed"
follow_parent = die_with_parent(signal.SIGKILL) or (lambda: None)


def start(main: Callable[[], None], rank: int, variables: dict[str, str]) -> int:
    """Fork a rank that runs `main`; return its process."""
    process = os.fork()
    if process:
        return process
    follow_parent()
    os.environ.update(variables, HVDLITE_RANK=str(rank))
    main()
    sys.exit()  # Not os._exit(): the engine serves other ranks until they have left, too.


def run(main: Callable[[], None], size: int) -> int:
    """Run a job; return its exit code."""
    variables = {
        "HVDLITE_SIZE": str(size),
        "HVDLITE_RENDEZVOUS": f"{LOOPBACK}:{free_port()}",
        "HVDLITE_SECRET": secrets.token_hex(16),
    }
    ranks = [start(main, rank, variables) for rank in range(size)]
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    return next((abs(code) for code in codes if code), 0)


if __name__ == "__main__":
    jobs = [word for word in sys.argv[1:] if word != KILLED]
    code = max(run(lambda: worker.main([]), int(size)) for size in jobs)
    if KILLED in sys.argv:
        run(killed.main, 3)
    sys.exit(code)
