"""The public names of hvdlite.tf, and where else they can be found."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest
import tensorflow as tf

import hvdlite.tf as hvd
from tests.limits import HANG_SECONDS
from tests.test_public_api import TF_FILE, golden, signatures, unexplained

HOROVOD = [
    "Compression", "allgather_object", "broadcast_object", "broadcast_object_fn",
    "broadcast_variables", "allgather", "grouped_allgather", "broadcast", "broadcast_",
    "alltoall", "allreduce", "grouped_allreduce", "reducescatter", "grouped_reducescatter",
    "init", "shutdown", "is_initialized", "start_timeline", "stop_timeline", "size",
    "local_size", "cross_size", "rank", "local_rank", "cross_rank", "is_homogeneous", "rank_op",
    "local_rank_op", "size_op", "local_size_op", "process_set_included_op",
    "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built",
    "nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "ProcessSet",
    "global_process_set", "add_process_set", "remove_process_set", "Average", "Sum", "Adasum",
    "Min", "Max", "Product", "handle_average_backwards_compatibility",
    "check_num_rank_power_of_2", "vars_to_refs", "refs_to_vars", "join",
    "SyncBatchNormalization", "broadcast_global_variables", "BroadcastGlobalVariablesHook",
    "DistributedOptimizer", "DistributedGradientTape", "PartialDistributedGradientTape",
    "gpu_available", "split_list", "check_extension",
    "elastic",
]  # fmt: skip
OWN = [
    "HorovodInternalError", "barrier", "checkpoint", "data", "halo", "metrics", "progress",
    "set_comm_fusion",
    "set_split_strategy_by_idx", "set_split_strategy_by_size", "trace_iterations",
]  # fmt: skip


def test_signatures() -> None:
    assert signatures(hvd) == golden(TF_FILE)


def test_the_names_are_those_of_horovod_and_a_few_more() -> None:
    assert sorted(hvd.__all__) == sorted(HOROVOD + OWN)


@pytest.mark.parametrize(
    ("submodule", "name"),
    [
        ("mpi_ops", "allreduce"),
        ("util", "vars_to_refs"),
        ("functions", "broadcast_variables"),
        ("compression", "Compression"),
        ("sync_batch_norm", "SyncBatchNormalization"),
    ],
)
def test_submodules(submodule: str, name: str) -> None:
    module = importlib.import_module(f"hvdlite.tensorflow.{submodule}")
    assert getattr(hvd, submodule) is module
    assert hasattr(module, name)


def test_references_to_variables() -> None:
    variables = [tf.Variable(1.0), [tf.Variable(2.0)]]
    references = hvd.vars_to_refs(variables)
    assert {references: 1}[hvd.vars_to_refs(variables)] == 1
    found = hvd.refs_to_vars(references)
    assert found[0] is variables[0]
    assert found[1][0] is variables[1][0]


def test_helpers() -> None:
    assert hvd.handle_average_backwards_compatibility(hvd.Sum, None) == hvd.Sum
    assert [number for number in range(6) if hvd.check_num_rank_power_of_2(number)] == [1, 2, 4]
    assert hvd._check_has_gpu() == bool(tf.config.list_physical_devices("GPU"))
    hvd.check_extension("hvdlite.tensorflow", "HVDLITE_WITH_TENSORFLOW", __file__)


def test_keras_is_left_alone_until_it_is_needed() -> None:
    """TensorFlow itself imports Keras 3, but not Keras 2 where that takes its place."""
    program = (
        "import os, sys; os.environ['TF_USE_LEGACY_KERAS'] = '1'; import tensorflow;"
        "before = set(sys.modules); import hvdlite.tf;"
        "sys.exit(any(name.startswith('keras') for name in set(sys.modules) - before))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_SECONDS)


def test_every_argument_is_explained() -> None:
    for name in ["DistributedOptimizer", "DistributedGradientTape"]:
        assert unexplained(getattr(hvd, name)) == []
