"""The small queries of the public API: rank, size, the timeline, and which libraries are in use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

from hvdlite.common.runtime.current import current, find

log = logging.getLogger("hvdlite")


def is_initialized() -> bool:
    """Return whether `init` was called, and `shutdown` was not."""
    return find() is not None


def rank() -> int:
    """Return this rank, from 0. Raises `ValueError` before `init`, as all of these do."""
    return current().rank


def size() -> int:
    """Return the number of ranks of the job."""
    return current().topology.size


def local_rank() -> int:
    """Return the number of this rank on its host, from 0."""
    runtime = current()
    return runtime.topology.local_rank(runtime.rank)


def local_size() -> int:
    """Return the number of ranks on this host."""
    runtime = current()
    return len(runtime.topology.peers(runtime.rank))


def cross_rank() -> int:
    """Return the number of this host among those that have this local rank, from 0."""
    runtime = current()
    return runtime.topology.cross_peers(runtime.rank).index(runtime.rank)


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    runtime = current()
    return len(runtime.topology.cross_peers(runtime.rank))


def is_homogeneous() -> bool:
    """Return whether every host has the same number of ranks."""
    return current().topology.homogeneous


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Record a timeline to `file_path` from now on (rank 0, or all ranks as the settings say).

    Raises `ValueError` before `init`, `OSError` when the file cannot be written.
    """
    current().recording.start(file_path, mark_cycles)


def stop_timeline() -> None:
    """Stop the recording and close the file. Raises `ValueError` before `init`."""
    runtime = current()
    if not runtime.timeline.enabled:
        log.debug("the timeline was stopped already")
    runtime.recording.stop()


def mpi_threads_supported() -> bool:
    """Return whether MPI runs with THREAD_MULTIPLE.

    Raises `ValueError` where MPI has not started this job.
    """
    if not mpi_enabled():
        raise ValueError("MPI is not enabled: this job was not started by an MPI launcher")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Return whether MPI has started this job, so that communicators can be used.

    The ranks may be connected over TCP all the same. Raises `ValueError` before `init`.
    """
    return current().mpi_group is not None


def mpi_built() -> bool:
    """Return whether mpi4py is installed."""
    return find_spec("mpi4py") is not None


def gloo_enabled() -> bool:
    """Return whether hvdlite does in this job what Horovod uses Gloo for: all but MPI's part.

    That is a job that MPI has not started. False before `init`.
    """
    runtime = find()
    return runtime is not None and runtime.mpi_group is None


def gloo_built() -> bool:
    """Return True: ranks can meet and talk over TCP, for which Horovod needs Gloo."""
    return True


def _absent(library: str) -> Callable[[], bool]:
    def answer() -> bool:
        return False

    answer.__doc__ = f"Return False: hvdlite does not use {library}."
    return answer


ddl_built = _absent("DDL")
ccl_built = _absent("oneCCL")
cuda_built = _absent("compiled CUDA code")
rocm_built = _absent("compiled ROCm code")


def nccl_built() -> int:
    """Return 0: hvdlite does not use NCCL."""
    return 0
