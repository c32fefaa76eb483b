"""Jobs of ranks that are forked from one process: fork_ranks SIZE [SIZE ...] [killed]

The modules of torch for sharding take seconds to import, and so would each rank. The exit code is
that of the first rank that failed.
"""

from __future__ import annotations

import gc
import sys

# What features import, each rank for itself otherwise.
import torch._dynamo.backends.debugging
import torch._functorch.compilers
import torch.distributed.checkpoint.state_dict
import torch.distributed.optim
import torch.distributed.pipelining  # noqa: F401

from tests.parallel.process_group import killed, worker
from tests.parallel.start_ranks import fork, on_this_host, run_job

KILLED = "killed"


def run(module: str, size: int) -> int:
    """Run a job; return its exit code."""
    return run_job(fork, [sys.executable, "-m", module], on_this_host(size))


if __name__ == "__main__":
    gc.collect()
    gc.freeze()  # Some features look through all objects: not through those of the modules.
    jobs = [word for word in sys.argv[1:] if word != KILLED]
    code = max(run(worker.__name__, int(size)) for size in jobs)
    if KILLED in sys.argv:
        run(killed.__name__, 3)
    sys.exit(code)
