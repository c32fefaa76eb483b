"""What a user has told an MPI already, by --mpi-args, --binding-args, variables and files."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

# Flags of mpirun and srun that bind ranks to cores.
BINDING_FLAGS = {"bind-to", "bind", "bind-to-core", "bind-to-socket", "cpu-bind", "cpu_bind"}
# Flags of mpirun that say which rank runs where.
MAPPING_FLAGS = {"map-by", "rank-by", "ppr", "npernode", "N", "npersocket", "pernode", "rankfile",
                 "rf", "bynode", "byslot", "host", "H", "hosts", "hostfile", "machinefile", "f",
                 "ppn", "perhost", "grr", "rr"}  # fmt: skip


def flags_in(arguments: Sequence[str]) -> set[str]:
    """Return the names of the flags among `arguments`, without dashes and values."""
    return {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}


def places_ranks(arguments: Sequence[str]) -> bool:
    """Return whether `arguments` say which rank runs where."""
    return bool(flags_in(arguments) & MAPPING_FLAGS)


def binds_ranks(arguments: Sequence[str]) -> bool:
    """Return whether `arguments` bind each rank to cores of its own."""
    values = " ".join(arguments).replace("=", " ").split()
    return bool(flags_in(arguments) & BINDING_FLAGS) and "none" not in values


PARAMETER_FLAGS = ("mca", "omca", "gmca")  # of mpirun: --mca NAME VALUE
# What the user's own way to other hosts is called: then ssh says nothing about them.
OWN_AGENT = re.compile(r"PRTE_MCA_plm_ssh_agent|OMPI_MCA_plm_rsh_agent|HYDRA_LAUNCHER(_EXEC)?")
OWN_AGENT_WORDS = re.compile(r"plm_(ssh|rsh)_agent|-launcher(-exec)?")
FILE_FLAGS = ("tune", "am")  # of mpirun: files that may set any parameter


def parameter_given(
    name: str, environ: Mapping[str, str], arguments: Sequence[str], program: str
) -> bool:
    """Return whether the user has set the parameter `name` of Open MPI, such as ``btl``.

    A user sets it by a variable, by `arguments` of mpirun, or by a parameter file; `program` is the
    full path of the mpirun, beside which the file of its installation lies.
    """
    if environ.get(f"OMPI_MCA_{name}"):
        return True
    for position, word in enumerate(arguments):
        flag = word.lstrip("-") if word.startswith("-") else ""
        if flag in FILE_FLAGS:
            return True
        if flag in PARAMETER_FLAGS and name in arguments[position + 1 :][:1]:
            return True
    line = re.compile(rf"^\s*{re.escape(name)}\s*=", re.MULTILINE)
    return any(line.search(text) for text in _parameter_files(environ, program))


def _parameter_files(environ: Mapping[str, str], program: str) -> Iterator[str]:
    """Yield the text of each parameter file that Open MPI will read."""
    listed = environ.get("OMPI_MCA_mca_base_param_files")
    paths = re.split("[:,]", listed) if listed else [
        os.path.join(environ.get("HOME", ""), ".openmpi", "mca-params.conf"),
        os.path.join(os.path.dirname(program), "..", "etc", "openmpi-mca-params.conf"),
    ]  # fmt: skip
    for path in paths:
        try:
            yield Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue


def own_agent(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Return whether the user has another way to the hosts than ssh, by mpirun's `arguments`."""
    return any(OWN_AGENT.fullmatch(name) for name in environ) or any(
        OWN_AGENT_WORDS.fullmatch(word) for word in arguments
    )
