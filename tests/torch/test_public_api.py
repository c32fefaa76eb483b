"""The public names of hvdlite.torch, and where else they can be found."""

from __future__ import annotations

import importlib

import pytest
import torch

import hvdlite.torch as hvd
from tests.test_public_api import TORCH_FILE, golden, signatures, unexplained

HOROVOD = [
    "Compression", "allgather_object", "broadcast_object", "broadcast_optimizer_state",
    "broadcast_parameters", "allreduce", "allreduce_async", "allreduce_", "allreduce_async_",
    "grouped_allreduce", "grouped_allreduce_async", "grouped_allreduce_",
    "grouped_allreduce_async_", "sparse_allreduce_async", "allgather", "allgather_async",
    "grouped_allgather", "grouped_allgather_async", "broadcast", "broadcast_async", "broadcast_",
    "broadcast_async_", "alltoall", "alltoall_async", "reducescatter", "reducescatter_async",
    "grouped_reducescatter", "grouped_reducescatter_async", "join", "barrier", "poll",
    "synchronize", "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline",
    "size", "local_size", "cross_size", "rank", "local_rank", "cross_rank",
    "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built",
    "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet",
    "global_process_set", "add_process_set", "remove_process_set", "Average", "Sum", "Adasum",
    "Min", "Max", "Product", "HorovodInternalError", "DistributedOptimizer", "SyncBatchNorm",
    "elastic",
]  # fmt: skip
OWN = [
    "SpatialConv2d", "checkpoint", "data", "halo", "init_process_group", "metrics", "progress",
    "set_comm_fusion", "set_split_strategy_by_idx", "set_split_strategy_by_size",
    "trace_iterations",
]  # fmt: skip


def test_signatures() -> None:
    assert signatures(hvd) == golden(TORCH_FILE)


def test_the_names_are_those_of_horovod_and_a_few_more() -> None:
    assert sorted(hvd.__all__) == sorted(HOROVOD + OWN)


@pytest.mark.parametrize(
    ("submodule", "name"),
    [
        ("mpi_ops", "allreduce"),
        ("mpi_ops", "is_homogeneous"),
        ("functions", "broadcast_parameters"),
        ("optimizer", "DistributedOptimizer"),
        ("compression", "Compression"),
        ("sync_batch_norm", "SyncBatchNorm"),
    ],
)
def test_submodules(submodule: str, name: str) -> None:
    module = importlib.import_module(f"hvdlite.torch.{submodule}")
    assert getattr(hvd, submodule) is module
    assert hasattr(module, name)


def test_operations_are_the_numbers_of_horovod() -> None:
    names = ("Average", "Sum", "Adasum", "Min", "Max", "Product")
    assert [getattr(hvd, name) for name in names] == list(range(6))


def test_check_has_gpu() -> None:
    assert hvd._check_has_gpu() == torch.cuda.is_available()


def test_every_argument_is_explained() -> None:
    assert unexplained(hvd.DistributedOptimizer) == []
