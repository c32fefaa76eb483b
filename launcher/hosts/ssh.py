"""The command lines of ssh, and of the agent that it starts on another host."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Mapping

import hvdlite
from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.options import LaunchOptions

AGENT_MODULE = "hvdlite.launcher.agent_process.agent"
CONNECT_SECONDS = 10  # Also for the greeting of a server that accepts connections and hangs.


def ssh_arguments(options: LaunchOptions) -> list[str]:
    """Return the flags of ssh that the user's options ask for."""
    arguments = []
    if options.ssh_port is not None:
        arguments += ["-p", str(options.ssh_port)]
    if options.ssh_identity_file is not None:
        arguments += ["-i", options.ssh_identity_file]
    return [*arguments, *options.ssh_args]  # of two values, ssh takes the first


def connect_seconds(options: LaunchOptions) -> int:
    """Return how long ssh may take to connect: its words must come before the start is given up."""
    return max(1, min(CONNECT_SECONDS, int(options.start_timeout_seconds * 3 / 4)))


def ssh_command(host: str, command: str, options: LaunchOptions, path: str | None) -> list[str]:
    """Return the command line that runs `command`, a text for the shell there, on `host`.

    ssh asks nobody, and what the user's own configuration says for the host holds. `path` is where
    ssh is looked for. Raises `ConfigError` where there is none.
    """
    program = shutil.which("ssh", path=path)
    if program is None:
        raise ConfigError("there is no ssh here: install an ssh client, or give hosts none of "
                          "which is another one")  # fmt: skip
    flags = ["-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={connect_seconds(options)}"]
    return [program, *flags, *ssh_arguments(options), "--", host, command]


def agent_command() -> list[str]:
    return [sys.executable, "-m", AGENT_MODULE]


def agent_path(environ: Mapping[str, str]) -> str:
    """Return the PYTHONPATH by which an agent finds the hvdlite that runs here."""
    given = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    home = os.path.dirname(os.path.dirname(os.path.abspath(hvdlite.__file__)))
    return os.pathsep.join([*map(os.path.abspath, given), home])


def remote_agent_command(environ: Mapping[str, str]) -> str:
    """Return the text by which a shell on another host starts an agent.

    It runs in the root directory, where no file of the user's shadows a module.
    """
    variables = f"PYTHONPATH={agent_path(environ)}"
    return f"cd / && exec env {shlex.join([variables, *agent_command()])}"
