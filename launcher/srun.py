"""The command line of the one srun that starts an agent on each node of an allocation."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence

from hvdlite.common.base.errors import ConfigError

# What sbatch says about tasks does not hold for the agents, and srun would obey it.
ABOUT_TASKS = re.compile(
    r"S(LURM|RUN)_(NTASKS_PER_\w+|(CPUS|GPUS|TRES|MEM)_PER_TASK|NTASKS|NPROCS)"
)


def srun_command(
    nodes: Sequence[str], command: Sequence[str], added: Sequence[str], path: str | None
) -> list[str]:
    """Return the command line that runs `command` once on each of `nodes`.

    An agent gets all that the job has on its node, and shares it with other steps; it needs no PMI.
    `added` are arguments of the user's for srun, which is looked for in `path`.
    """
    program = shutil.which("srun", path=path)
    if program is None:
        raise ConfigError("--launcher srun: there is no srun here")
    return [
        program, f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}", "--export=ALL", "--mpi=none", "--cpu-bind=none",
        "--kill-on-bad-exit=0", "--overlap", "--input=none", "--quiet", *added, *command,
    ]  # fmt: skip


def srun_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what it says about the tasks of a step."""
    return {name: text for name, text in environ.items() if not ABOUT_TASKS.fullmatch(name)}
