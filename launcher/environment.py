"""The environment of the ranks: the user's own, less what belongs to another job."""

from __future__ import annotations

import os
from collections.abc import Mapping

from hvdlite.common.base.fabric import has_fabric
from hvdlite.launcher.commands import build_environment
from hvdlite.launcher.mpi import HYDRA, SLURM, Mpi, library_of
from hvdlite.launcher.openmpi import parameter_given
from hvdlite.launcher.options import LaunchOptions
from hvdlite.launcher.passed_variables import of_another_job


def rank_environment(
    environ: Mapping[str, str], mpi: Mpi | None, options: LaunchOptions
) -> dict[str, str]:
    """Return the ranks' environment: `environ`, flags and config file, and defaults.

    `mpi` is None where agents start the ranks.
    """
    passed = {name: value for name, value in environ.items() if not of_another_job(name)}
    passed |= options.variables
    if mpi is not None:
        passed = _with_library(passed, mpi)
    if options.as_horovod:
        from hvdlite.as_horovod import environment

        passed |= environment(passed)
    # Output before a crash must not be lost in a pipe's buffer.
    defaults = {"PYTHONUNBUFFERED": "1"}
    if mpi is not None:
        defaults |= _openmpi_defaults(environ, mpi, options) | build_environment(mpi, options)
    elif options.tcp:
        defaults["HVDLITE_TRANSPORT"] = "tcp"
    return passed | {name: value for name, value in defaults.items() if not passed.get(name)}


def _with_library(passed: Mapping[str, str], mpi: Mpi) -> dict[str, str]:
    """Return `passed` with the path of the MPI library in the place of the name of its ABI.

    Given MPI4PY_MPIABI, mpi4py imports the module for that ABI without looking for the library
    first, and the dynamic linker does not look inside a Python environment, where wheels put it.
    """
    library = passed.get("MPI4PY_LIBMPI") or library_of(mpi)
    if not passed.get("MPI4PY_MPIABI") or not library:
        return dict(passed)
    others = {name: value for name, value in passed.items() if name != "MPI4PY_MPIABI"}
    return others | {"MPI4PY_LIBMPI": library}


def _openmpi_defaults(
    environ: Mapping[str, str], mpi: Mpi, options: LaunchOptions
) -> dict[str, str]:
    """Return the parameters of Open MPI that are set where the user has not set them.

    btl/ofi carries only one-sided operations over a fabric, and opening libfabric for it costs a
    second of every start; mtl/ofi, which carries messages over a fabric, stays. The osc component
    of UCX prints lines about its priority, and hvdlite does not use it.
    """
    if HYDRA in (mpi.kind, mpi.library):
        return {}
    defaults = {"osc": "^ucx"}
    if not has_fabric():
        defaults["btl"] = "^ofi"
    return {
        f"OMPI_MCA_{name}": value
        for name, value in defaults.items()
        if not parameter_given(name, environ, options.mpi_args, mpi.program)
    }


def most_local_ranks(environ: Mapping[str, str], mpi: Mpi, options: LaunchOptions) -> int:
    """Return the number of ranks of the fullest host."""
    nodes = environ.get("SLURM_NNODES", "")
    if mpi.kind == SLURM and nodes.isdecimal() and int(nodes):
        return -(-options.num_proc // int(nodes))
    return max(options.counts)


def is_root() -> bool:
    """We run as the superuser."""
    return os.geteuid() == 0
