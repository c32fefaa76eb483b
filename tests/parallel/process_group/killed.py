"""A job of 3 ranks of which the last one is killed while the others wait for it.

Each of the others prints ``KILLED its rank, class of the error, seconds and text``.
"""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd


def main() -> None:
    """Wait on rank 0 for a collective and on rank 1 for DDP; be killed on rank 2."""
    torch.set_num_threads(1)
    hvd.init_process_group()
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    model(torch.ones(1, 4)).sum().backward()
    start = time.monotonic()
    if hvd.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        if hvd.rank() == 0:
            dist.all_reduce(torch.ones(5))
        else:
            model(torch.ones(1, 4)).sum().backward()
    except RuntimeError as error:
        text = str(error).replace("\n", " ")
        seconds = time.monotonic() - start
        line = f"KILLED {hvd.rank()} {type(error).__name__} {seconds:.2f} {text}\n"
        os.write(1, line.encode())  # In one piece.


if __name__ == "__main__":
    main()
