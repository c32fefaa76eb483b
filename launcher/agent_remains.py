"""What an agent that could not end well may leave: process groups, and its folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
from collections.abc import Iterable, Mapping

from hvdlite.launcher.agent_connection import AgentConnection
from hvdlite.launcher.options import LaunchOptions
from hvdlite.launcher.ssh import ssh_command


def kill_groups(groups: Iterable[int]) -> None:
    """Kill process groups of this host."""
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


def remove_here(agent: AgentConnection, groups: Iterable[int]) -> None:
    """Kill the process groups of an agent of this host, and remove its folder."""
    kill_groups(groups)
    shutil.rmtree(agent.folder or os.devnull, ignore_errors=True)


def removal_command(
    agent: AgentConnection,
    groups: Iterable[int],
    options: LaunchOptions,
    environ: Mapping[str, str],
) -> list[str]:
    """Return the ssh command that does the same on another host."""
    kill = "".join(f"kill -KILL -- -{group} 2>/dev/null; " for group in groups)
    there = f"{kill}rm -rf {shlex.quote(agent.folder)}"
    return ssh_command(agent.host.name, there, options, environ.get("PATH"))
