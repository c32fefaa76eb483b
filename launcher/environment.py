"""The environment of the ranks: the user's own, less what belongs to another job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from hvdlite.launcher.commands import build_environment
from hvdlite.launcher.mpi import HYDRA, SLURM, Mpi, library_of
from hvdlite.launcher.openmpi import has_fabric, parameter_given
from hvdlite.launcher.options import LaunchOptions

# Shell functions, secrets of a launcher, and what an outer MPI job told this process about itself.
NOT_PASSED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|HVDLITE_LAUNCHER_.*"
    r"|(HVDLITE|HOROVOD)_((LOCAL|CROSS)_)?(RANK|SIZE)"
    r"|PMIX_(?!MCA_).*|PMI_.*|PMIX?[RUI]?_FD|HYDI_CONTROL_FD|MPI_LOCAL.*"
    r"|OMPI_COMM_WORLD_.*|OMPI_(WORLD|UNIVERSE|FILE|APP_CTX|FIRST)_.*|PRTE_LAUNCHED"
    r"|OMPI_MCA_(num_procs|initial_wdir|cpu_type|orte_.*|ess_.*)"
)
# What describes this host, session or terminal is not for other hosts.
NOT_TO_OTHER_HOSTS = re.compile(
    r"HOSTNAME|HOST|PWD|SHLVL|_|TERM.*|DISPLAY|WAYLAND_.*|XDG_.*|SSH_.*|DBUS_.*|TMPDIR|TEMP|TMP"
    r"|LS_COLORS|WINDOWID|.*CUDA_VISIBLE_DEVICES|SLURM_.*|PRTE_MCA_.*"
    r"|K_MPI_JOB_ROLE|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)"
)


def rank_environment(
    environ: Mapping[str, str], mpi: Mpi, options: LaunchOptions
) -> dict[str, str]:
    """Return the ranks' environment: `environ`, flags and config file, and defaults."""
    passed = {name: value for name, value in environ.items() if not NOT_PASSED.fullmatch(name)}
    passed |= options.variables
    passed = _with_library(passed, mpi)
    if options.as_horovod:
        from hvdlite.as_horovod import environment

        passed |= environment(passed)
    defaults = {
        "PYTHONUNBUFFERED": "1",  # output before a crash must not be lost in a pipe's buffer
        **_openmpi_defaults(environ, mpi, options),
        **build_environment(mpi, options),
    }
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


def names_for_other_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the variables that ranks on other hosts get."""
    return tuple(sorted(name for name in environ if not NOT_TO_OTHER_HOSTS.fullmatch(name)))


def most_local_ranks(environ: Mapping[str, str], mpi: Mpi, options: LaunchOptions) -> int:
    """Return the number of ranks of the fullest host."""
    nodes = environ.get("SLURM_NNODES", "")
    if mpi.kind == SLURM and nodes.isdecimal() and int(nodes):
        return -(-options.num_proc // int(nodes))
    return max(options.counts)


def home_directory(environ: Mapping[str, str]) -> str | None:
    """Return the user's home; None where there is none: no variable, and no entry in passwd."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return None if home == "~" else home


def is_root() -> bool:
    """We run as the superuser."""
    return os.geteuid() == 0
