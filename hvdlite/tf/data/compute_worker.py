"""The compute job of a TF data service: every rank is a worker until a training job ends it.

hvdlite-run -np 8 python -m hvdlite.tf.data.compute_worker CONFIGFILE
"""

from __future__ import annotations

import argparse
import os
import secrets
from collections.abc import Sequence

from hvdlite.common.api.objects import broadcast_object
from hvdlite.common.runtime import basics
from hvdlite.common.runtime.lifecycle import init
from hvdlite.tf.data.compute_service import (
    SIDES,
    ComputeService,
    TfDataServiceConfig,
    compute_worker_fn,
)


def main(dispatchers: int, dispatcher_side: str, configfile: str, timeout: float) -> None:
    """Start the data service on this rank, and stay until it is ended.

    Rank 0 writes `configfile`, which training jobs read, and removes it at the end. Raises
    `ValueError` where the ranks cannot be divided among the dispatchers.
    """
    if not basics.is_initialized():
        init()
    size = basics.size()
    if dispatchers < 1 or size % dispatchers:
        raise ValueError(
            f"--dispatchers {dispatchers}: the {size} ranks of the job cannot be divided among "
            "them; each needs the same number of workers, one at least"
        )
    workers = size // dispatchers
    service: ComputeService | None = None
    config: TfDataServiceConfig | None = None
    if basics.rank() == 0:
        key = secrets.token_bytes(32)
        service = ComputeService(dispatchers, workers, key)
        config = TfDataServiceConfig(
            dispatchers, workers, dispatcher_side, service.addresses(), key, timeout
        )
        config.write(configfile)
    try:
        compute_worker_fn(broadcast_object(config, 0, name="TfDataServiceConfig"))
    finally:
        if service is not None:
            service.close()
            if os.path.exists(configfile):  # nobody shall find a service that has ended
                os.remove(configfile)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the command line's values."""
    parser = argparse.ArgumentParser(
        prog="python -m hvdlite.tf.data.compute_worker", description=__doc__.splitlines()[0]
    )
    parser.add_argument("configfile", help="where rank 0 writes how the service is reached")
    parser.add_argument(
        "--dispatchers", type=int, default=1, help="the number of dispatchers (default: 1)"
    )
    parser.add_argument(
        "--dispatcher-side", choices=SIDES, default="compute",
        help="the job that runs the dispatchers (default: compute)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=float, default=60.0,
        help="seconds to wait for dispatchers and workers (default: 60)",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    given = parse()
    main(given.dispatchers, given.dispatcher_side, given.configfile, given.timeout)
