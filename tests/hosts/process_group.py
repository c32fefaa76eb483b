"""A rank of a job on several hosts: features of the process group, then DDP until the job ends.

Each rank prints ``placed rank cross_size``, and ``up`` when the features were tried.
"""

from __future__ import annotations

import time
import warnings
from datetime import timedelta

import torch
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from tests.parallel.process_group import (  # noqa: F401 - each module registers its features
    check_calls,
    check_checkpoints,
    check_ddp,
    check_fsdp,
    check_groups,
    check_pipelines,
    check_reductions,
    features,
)

# Each compares with what one process computes.
FEATURES = [
    *("reductions", "all_gathers", "reduce_scatters", "all_to_alls", "messages", "objects"),
    *("broadcasts_gathers_and_scatters", "groups_of_some_ranks", "groups_in_threads"),
    *("groups_that_their_members_make_alone", "ddp", "fsdp2", "fsdp2_hybrid"),
    "two_pipelines_of_two_stages",
]
TIMEOUT = timedelta(seconds=30)


def main() -> None:
    """Try the features; then reduce gradients for ever."""
    warnings.simplefilter("ignore")  # torch renames its functions from release to release.
    torch.set_num_threads(1)
    hvd.init_process_group(TIMEOUT)
    print("placed", hvd.rank(), hvd.cross_size(), flush=True)
    features.run(FEATURES, TIMEOUT)
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    print("up", flush=True)
    while True:
        model(torch.ones(1, 4)).sum().backward()
        time.sleep(0.01)


if __name__ == "__main__":
    main()
