"""Which variables of the environment go to ranks, here and on other hosts. Names alone decide."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

# Shell functions, secrets of a launcher, and what an outer job told this process about itself.
NOT_PASSED = re.compile(
    r"BASH_FUNC_.*|OLDPWD|_HOROVOD_SECRET_KEY|HVDLITE_LAUNCHER_.*"
    r"|(HVDLITE|HOROVOD)_((LOCAL|CROSS)_)?(RANK|SIZE)"
    r"|HVDLITE_(RENDEZVOUS(_SERVER)?|SECRET|HOST_NAME|RANK_PROCESS|WORKER|ELASTIC_DRIVER)"
    r"|(HVDLITE|HOROVOD)_(ELASTIC|HOSTNAME)"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|GROUP_WORLD_SIZE|TORCHELASTIC_.*"
    r"|PMIX_(?!MCA_).*|PMI_.*|PMIX?[RUI]?_FD|HYDI_CONTROL_FD|MPI_LOCAL.*"
    r"|OMPI_COMM_WORLD_.*|OMPI_(WORLD|UNIVERSE|FILE|APP_CTX|FIRST)_.*|PRTE_LAUNCHED"
    r"|JSM_NAMESPACE_.*|OMPI_MCA_(num_procs|initial_wdir|cpu_type|orte_.*|ess_.*)"
)
CALL_VARIABLE = "HVDLITE_LAUNCHER_CALL"  # The folder in which ranks of hvdlite.run find the call.
# What describes this host, session or terminal is not for other hosts.
NOT_TO_OTHER_HOSTS = re.compile(
    r"HOSTNAME|HOST|PWD|SHLVL|_|TERM.*|DISPLAY|WAYLAND_.*|XDG_.*|SSH_.*|DBUS_.*|TMPDIR|TEMP|TMP"
    r"|LS_COLORS|WINDOWID|.*_VISIBLE_DEVICES|ZE_AFFINITY_MASK|SLURM_(?!CPUS_PER_TASK$).*|PRTE_MCA_.*"
    r"|K_MPI_JOB_ROLE|NVIDIA_(VISIBLE_DEVICES|DRIVER_CAPABILITIES)"
)


def of_another_job(name: str) -> bool:
    """Return whether no rank gets the variable `name`."""
    return NOT_PASSED.fullmatch(name) is not None


def names_for_other_hosts(environ: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the variables that ranks on other hosts get."""
    return tuple(sorted(name for name in environ if not NOT_TO_OTHER_HOSTS.fullmatch(name)))


def home_directory(environ: Mapping[str, str]) -> str | None:
    """Return the user's home; None where there is none: no variable, and no entry in passwd."""
    home = environ.get("HOME") or os.path.expanduser("~")
    return None if home == "~" else home
