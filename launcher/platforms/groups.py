"""The programs that start an agent on each host of an allocation: srun and jsrun."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.agents.group_agents import Group
from hvdlite.launcher.command_line.launcher_choice import SRUN
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.platforms.jsrun import TASK_NUMBER, jsrun_command, resource_file
from hvdlite.launcher.platforms.slurm_step import (
    NODE_NAME,
    NOISE,
    agents_command,
    agents_environment,
)

SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")


def make_group(
    launcher: str, hosts: Sequence[str], options: LaunchOptions, environ: Mapping[str, str]
) -> Group:
    """Return what starts the agents of a job; `launcher` is SRUN or JSRUN, and
    `hosts` are those that get ranks.

    Raises `ConfigError` where the program is not there.
    """
    program = shutil.which(launcher, path=environ.get("PATH"))
    if program is None:
        raise ConfigError(f"--launcher {launcher}: there is no {launcher} in PATH")
    if launcher == SRUN:
        return _srun(program, hosts, options.mpi_args, environ)
    used = [host for host in options.hosts if host.name in hosts]
    return _jsrun(program, used, environ)


def _srun(
    program: str, hosts: Sequence[str], added: Sequence[str], environ: Mapping[str, str]
) -> Group:
    return Group(
        name="srun",
        command=lambda agent: agents_command(program, hosts, added, agent),
        environ=agents_environment(environ),
        named_by=NODE_NAME,
        names=tuple(hosts),
        noise=NOISE.pattern,
    )


def _jsrun(program: str, hosts: Sequence[Host], environ: Mapping[str, str]) -> Group:
    descriptor, path = tempfile.mkstemp(prefix="hvdlite-jsrun-")
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(resource_file(hosts, threads_per_core()))
    return Group(
        name="jsrun",
        command=lambda agent: jsrun_command(program, path, agent),
        environ=environ,
        named_by=TASK_NUMBER,
        names=tuple(map(str, range(len(hosts)))),
        clean_up=lambda: Path(path).unlink(missing_ok=True),
    )


def threads_per_core(siblings: Path = SIBLINGS) -> int:
    """Return how many logical processors a core of this host has; those of a job are alike."""
    try:
        text = siblings.read_text(encoding="ascii")
    except OSError:
        return 1
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return max(1, sum(int(last or first) - int(first) + 1 for first, last in ranges))
