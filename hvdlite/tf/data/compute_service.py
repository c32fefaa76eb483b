"""A TF data service whose workers are the ranks of another job: it makes the batches of this one.

The compute job, which `compute_worker` starts, writes how it is reached to a file:

    hvdlite-run -np 8 python -m hvdlite.tf.data.compute_worker /shared/service.json

The training job reads the file, and hands its dataset over:

    config = TfDataServiceConfig.read("/shared/service.json", wait_for_file_creation=True)
    dataset = dataset.send_to_data_service(config, hvd.rank(), hvd.size())
    ...
    if hvd.rank() == 0:
        config.compute_client().shutdown()  # the compute job ends

Importing this module gives `tf.data.Dataset` the method `send_to_data_service`.
"""

from __future__ import annotations

import atexit
import base64
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import tensorflow as tf

from hvdlite.common.runtime import basics
from hvdlite.common.runtime.lifecycle import init
from hvdlite.tf.data.meeting import ComputeClient, ComputeService

log = logging.getLogger("hvdlite")

SIDES = ("compute", "training")
_LOOK_SECONDS = 0.2  # between two looks for a file
_REMIND_SECONDS = 30.0

_own_dispatchers: dict[tuple[bytes, int], Any] = {}  # by key of the service and number


@dataclass
class TfDataServiceConfig:
    """How a data service is laid out, and how its `ComputeService` is reached.

    `dispatcher_side` says which job runs the dispatchers, "compute" or "training"; `addresses` has
    host and port by interface; `key` admits to the meeting point alone: TensorFlow's own servers
    take requests from everybody who reaches their ports, so keep these inside the cluster;
    `timeout` in seconds is how long anybody waits for the others to come. Raises `ValueError` for
    another side.
    """

    dispatchers: int
    workers_per_dispatcher: int
    dispatcher_side: str
    addresses: dict[str, list[tuple[str, int]]]
    key: bytes
    timeout: float = 60

    def __post_init__(self) -> None:
        if self.dispatcher_side not in SIDES:
            raise ValueError(
                f"dispatcher_side={self.dispatcher_side!r} must be 'compute' or 'training'"
            )

    def compute_client(self, verbose: int = 1) -> ComputeClient:
        """Return what talks to the compute service. `verbose` has no effect."""
        return ComputeClient(self.addresses, self.key)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold, for `from_dict`."""
        return {**asdict(self), "key": base64.b64encode(self.key).decode()}

    @staticmethod
    def from_dict(config: dict[str, Any]) -> TfDataServiceConfig:
        """Return the configuration that `to_dict` has told."""
        addresses = {
            name: [(str(host), int(port)) for host, port in each]
            for name, each in config["addresses"].items()
        }
        key = base64.b64decode(config["key"])
        return TfDataServiceConfig(**{**config, "addresses": addresses, "key": key})

    def write(self, filename: str) -> None:
        """Write a file for `read`, which only the own user can read: it holds the key."""
        path = f"{filename}.{os.getpid()}.tmp"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(self.to_dict(), file)
        os.replace(path, filename)  # who waits for the file finds all of it

    @staticmethod
    def read(filename: str, wait_for_file_creation: bool = False) -> TfDataServiceConfig:
        """Return the configuration in a file; `wait_for_file_creation`: sleep until there is one.

        Raises `OSError` for a file that cannot be read.
        """
        began = reminded = time.monotonic()
        while wait_for_file_creation and not os.path.exists(filename):
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() - reminded > _REMIND_SECONDS:
                reminded = time.monotonic()
                log.warning("no %s for %.0f s: is the compute job on?", filename, reminded - began)
        with open(filename, encoding="utf-8") as file:
            return TfDataServiceConfig.from_dict(json.load(file))


@contextmanager
def tf_data_service(compute_config: TfDataServiceConfig, rank: int) -> Iterator[str]:
    """Give the address of the dispatcher of a training rank, when all its workers are there.

    It is what ``tf.data.experimental.service.distribute(service=...)`` takes. Where the training
    side dispatches, the first ranks start the dispatchers, which live as long as their processes:
    other ranks may still read. Raises `TimeoutError` where others do not come, and
    `ConnectionError` where the compute service cannot be reached.
    """
    compute = compute_config.compute_client()
    number = rank % compute_config.dispatchers
    if compute_config.dispatcher_side == "training" and rank < compute_config.dispatchers:
        _start_dispatcher(compute_config, compute, number)
    address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
    compute.wait_for_dispatcher_worker_registration(number, compute_config.timeout)
    yield address


def send_to_data_service(
    dataset: tf.data.Dataset,
    compute_config: TfDataServiceConfig,
    rank: int,
    size: int | None = None,
    processing_mode: str = "distributed_epoch",
    reuse_dataset: bool = False,
    round_robin: bool = False,
) -> tf.data.Dataset:
    """Return the dataset as the compute job makes it, with dispatchers on the compute side.

    - `rank`, `size`: those of the training job; `size` is for `round_robin`.
    - `processing_mode`: see ``tf.data.experimental.service.distribute``.
    - `reuse_dataset`: all ranks of a dispatcher share the elements of one dataset, otherwise each
      gets all of them.
    - `round_robin`: ranks get elements in turns; they must share the dataset, which is infinite.

    Raises `RuntimeError` for dispatchers on the training side (see `tf_data_service`), `ValueError`
    for `round_robin` without `size` or `reuse_dataset`, and as `tf_data_service`.
    """
    if compute_config.dispatcher_side == "training":
        raise RuntimeError(
            "the training side runs the dispatchers of this data service: use tf_data_service(), "
            "or start compute_worker with --dispatcher-side compute"
        )
    if round_robin and not (size and reuse_dataset):
        raise ValueError(
            f"round_robin=True needs size and reuse_dataset=True, not size={size} and "
            f"reuse_dataset={reuse_dataset}"
        )
    with tf_data_service(compute_config, rank) as address:
        return dataset.apply(
            tf.data.experimental.service.distribute(
                processing_mode=processing_mode,
                service=address,
                job_name="job" if reuse_dataset else None,
                consumer_index=rank if round_robin else None,
                num_consumers=size if round_robin else None,
            )
        )


def compute_worker_fn(compute_config: TfDataServiceConfig) -> None:
    """Be a worker of the data service until it is ended; every rank of the compute job calls it.

    Starts hvdlite where that has not been done. Raises `ValueError` for a job of another size, and
    as `tf_data_service`.
    """
    if not basics.is_initialized():
        init()
    rank, size, workers = basics.rank(), basics.size(), compute_config.workers_per_dispatcher
    if size != compute_config.dispatchers * workers:
        raise ValueError(
            f"the compute job has {size} ranks, and the data service needs "
            f"{compute_config.dispatchers} dispatchers x {workers} workers: start it with as many"
        )
    compute = compute_config.compute_client()
    number = rank // workers
    dispatcher = None
    if compute_config.dispatcher_side == "compute" and rank % workers == 0:
        dispatcher = _start_dispatcher(compute_config, compute, number)
    address = compute.wait_for_dispatcher_registration(number, compute_config.timeout)
    worker = tf.data.experimental.service.WorkerServer(
        tf.data.experimental.service.WorkerConfig(
            dispatcher_address=address.rpartition("://")[2],
            worker_address=f"{compute.own_host()}:%port%",
            heartbeat_interval_ms=1000,
            dispatcher_timeout_ms=int(compute_config.timeout * 1000),
        )
    )
    compute.register_worker_for_dispatcher(number, rank)
    compute.wait_for_shutdown()
    for server in (worker, dispatcher):
        if server is not None:
            server._stop()


def _start_dispatcher(
    compute_config: TfDataServiceConfig, compute: ComputeClient, number: int
) -> Any:
    """Return a dispatcher that others can reach and know of; one that this process has is kept."""
    known = compute_config.key, number
    server = _own_dispatchers.get(known)
    if server is None:
        server = _own_dispatchers[known] = tf.data.experimental.service.DispatchServer()
        atexit.register(server._stop)
    port = server.target.rpartition(":")[2]
    compute.register_dispatcher(number, f"grpc://{compute.own_host()}:{port}")
    return server


tf.data.Dataset.send_to_data_service = send_to_data_service

__all__ = [
    "ComputeClient",
    "ComputeService",
    "TfDataServiceConfig",
    "compute_worker_fn",
    "send_to_data_service",
    "tf_data_service",
]
