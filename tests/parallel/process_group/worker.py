"""One rank that tries features of the process group: worker [NAME ...], by default all."""

from __future__ import annotations

import sys
import warnings
from datetime import timedelta

import torch
import torch.distributed as dist

import hvdlite.torch as hvd
from tests.parallel.process_group import (  # noqa: F401 - each module registers its features
    check_calls,
    check_checkpoints,
    check_ddp,
    check_dtensor,
    check_errors,
    check_fsdp,
    check_groups,
    check_peers,
    check_pipelines,
    check_reductions,
    features,
)

# A feature that waits in vain must not hold up the others.
TIMEOUT = timedelta(seconds=15)


def main(chosen: list[str]) -> None:
    """Try the features that are named, or all for this number of ranks."""
    warnings.simplefilter("ignore")  # torch renames its functions from release to release.
    torch.set_num_threads(1)
    hvd.init_process_group(TIMEOUT)
    size = dist.get_world_size()
    features.run(chosen or features.names(size), TIMEOUT)
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
