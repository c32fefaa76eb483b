"""What `--check-build` tries in a process of its own: `python -m hvdlite.tools.trials NAME`.

The process exits with 0 where the code works; the last line of its output says where it is from, or
what was found, or why it does not work.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np

RANKS = 2
ELEMENTS = 1_000_000  # more than fits in the slots at once
LIMIT_SECONDS = 60.0


class Found(NamedTuple):
    """How a trial has ended."""

    works: bool
    text: str


def shared_memory() -> Found:
    """Add arrays by the compiled allreduce on two ranks, which are threads."""
    from hvdlite.common.collectives.native.cache import BuildError
    from hvdlite.common.collectives.native.library import library

    try:
        loaded = library("on")
    except BuildError as error:
        return Found(False, str(error))
    assert loaded is not None
    sums = reduce_in_threads(loaded)
    expected = np.arange(ELEMENTS, dtype=np.float32) * 2 + sum(range(RANKS))
    if len(sums) == RANKS and all((each == expected).all() for each in sums):
        return Found(True, loaded.origin)
    wrong = f"the compiled allreduce ({loaded.origin}) gives a wrong sum, or none at all"
    return Found(False, wrong)


def reduce_in_threads(loaded: Any) -> list[Any]:
    """Return the sum on each rank that has one in time."""
    from hvdlite.common.base.reduce_op import ReduceOp
    from hvdlite.common.base.topology import Topology
    from hvdlite.common.collectives.base import Members, Reduction
    from hvdlite.common.collectives.shm import ShmBackend
    from hvdlite.common.transport.inprocess import InProcessWorld

    world = InProcessWorld(Topology.single_host(RANKS))
    sums: list[Any] = []

    def reduce(rank: int) -> None:
        array = np.arange(ELEMENTS, dtype=np.float32) + rank
        members = Members(tuple(range(RANKS)), rank, world.topology)
        backend = ShmBackend(world.transport(rank), loaded)
        backend.allreduce(
            members, [array], [array], Reduction(ReduceOp.SUM), lambda phase: nullcontext()
        )
        sums.append(array)

    threads = [threading.Thread(target=reduce, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
    return sums


def tensorflow_operations() -> Found:
    """Run a graph with a compiled collective on one rank."""
    import tensorflow as tf

    import hvdlite.tf as hvd
    from hvdlite.common.collectives.native.cache import BuildError

    os.environ["HVDLITE_TF_NATIVE"] = "on"  # otherwise Python takes its place
    hvd.init()
    values = tf.range(1000, dtype=tf.float32)
    try:
        result = tf.function(hvd.allreduce)(values)
    except BuildError as error:
        return Found(False, str(error))
    if not (result.numpy() == values.numpy()).all():
        return Found(False, "the compiled operations give a wrong result")
    return Found(True, f"compiled on this machine, for TensorFlow {tf.version.VERSION}")


def jax_programs() -> Found:
    """Run a program with a compiled collective on one rank."""
    import jax

    import hvdlite.jax as hvd
    from hvdlite.common.collectives.native.cache import BuildError
    from hvdlite.jax.native.library import Library, recipe

    hvd.init()
    try:
        recipe().load(Library)
    except BuildError as error:
        return Found(False, str(error))
    values = jax.numpy.arange(1000.0)
    if not (jax.jit(hvd.allreduce)(values) == values).all():
        return Found(False, "the compiled functions give a wrong result")
    return Found(True, f"compiled on this machine, for JAX {jax.__version__}")


def torch_devices() -> Found:
    """Tell which library of torch reduces tensors on the accelerator of this machine."""
    import torch

    from hvdlite.torch.accelerators.c10d import of_accelerator
    from hvdlite.torch.device_modules import accelerator_kind

    kind = accelerator_kind()
    if kind is None:
        return Found(False, f"torch {torch.__version__} sees no accelerator")
    library = of_accelerator()
    count = torch.get_device_module(kind).device_count()
    if library is None:
        return Found(False, f"{count} of {kind}, and torch has no process group for them")
    return Found(True, f"{library.name.partition(':')[2].upper()} for {count} of {kind}")


def tensorflow_devices() -> Found:
    """Tell whether tensors of TensorFlow are reduced on the GPUs of this machine, and by what."""
    import tensorflow as tf

    from hvdlite.common.base.errors import ConfigError
    from hvdlite.tf.accelerators.library import FAILURES, load_libraries, obstacle

    if reason := obstacle():
        return Found(False, reason)
    try:
        nccl, _ = load_libraries()
    except (*FAILURES, ConfigError) as error:
        return Found(False, str(error))
    count = len(tf.config.list_physical_devices("GPU"))
    return Found(True, f"NCCL {nccl.version_text} ({nccl.path}) for {count} of gpu")


def own_binding() -> Found:
    """Tell whether hvdlite's own binding finds NCCL and the CUDA runtime, and which."""
    from hvdlite.common.devices.nccl.binding import Nccl
    from hvdlite.common.devices.nccl.cudart import CudaRuntime
    from hvdlite.common.settings.config import Config

    config = Config.from_environ()
    try:
        nccl = Nccl(config.nccl_library)
        cuda = CudaRuntime(config.cudart_library)
    except (OSError, RuntimeError, ValueError) as error:
        return Found(False, str(error))
    text = f"NCCL {nccl.version_text} ({nccl.path}) for {cuda.device_count()} of cuda"
    return Found(bool(cuda.device_count()), f"{text}, with HVDLITE_DEVICES=nccl")


TRIALS = {
    trial.__name__: trial
    for trial in (
        shared_memory, tensorflow_operations, jax_programs,
        torch_devices, tensorflow_devices, own_binding,
    )
}  # fmt: skip


def main(name: str) -> int:
    """Print a line; return the exit status."""
    works, text = TRIALS[name]()
    print(text)
    return 0 if works else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
