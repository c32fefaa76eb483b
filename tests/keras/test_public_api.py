"""The public names of hvdlite.keras, and the other names of the module."""

from __future__ import annotations

import importlib

import hvdlite.keras as hvd
from hvdlite.keras.framework import adapter
from tests.test_public_api import KERAS_FILE, golden, signatures, unexplained

HOROVOD = [  # of horovod.keras or of horovod.tensorflow.keras
    "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size", "local_size",
    "cross_size", "rank", "local_rank", "cross_rank", "is_homogeneous", "mpi_threads_supported",
    "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built", "nccl_built", "ddl_built",
    "ccl_built", "cuda_built", "rocm_built", "ProcessSet", "global_process_set", "add_process_set",
    "remove_process_set", "Average", "Sum", "Adasum", "Compression", "callbacks",
    "DistributedOptimizer", "PartialDistributedOptimizer", "broadcast_global_variables",
    "allreduce", "allgather", "broadcast", "reducescatter", "load_model",
    "elastic",
]  # fmt: skip


def test_signatures() -> None:
    assert signatures(hvd) == golden(KERAS_FILE)


def test_the_names_are_those_of_horovod_and_of_the_other_adapters() -> None:
    own = ["set_comm_fusion", "set_split_strategy_by_idx", "set_split_strategy_by_size"]
    assert sorted(hvd.__all__) == sorted(
        [
            *HOROVOD,
            "Min",
            "Max",
            "Product",
            "HorovodInternalError",
            "checkpoint",
            "data",
            "metrics",
            "progress",
            "trace_iterations",
            *own,
        ]
    )


def test_second_names() -> None:
    if adapter().__name__ == "hvdlite.tf":
        for name in ("hvdlite.tf.keras", "hvdlite.tensorflow.keras"):
            assert importlib.import_module(name) is hvd
            assert importlib.import_module(f"{name}.callbacks") is hvd.callbacks


def test_compression_is_that_of_the_backend() -> None:
    assert hvd.Compression is adapter().Compression


def test_every_argument_is_explained() -> None:
    assert unexplained(hvd.DistributedOptimizer) == []
