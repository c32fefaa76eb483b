"""The way to another host: the command lines of ssh and of the agent there, and why it fails."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence

import hvdlite
from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.decisions.endings import signal_name

AGENT_MODULE = "hvdlite.launcher.agent_process.agent"
MOST_AT_ONCE = 32  # So many ssh connect at the same time: each costs some memory and CPU here.
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


# Why a host could not be reached, in one sentence: from what ssh, a shell or Open MPI say.


SAME_ENVIRONMENT = "make the same Python environment at the same path on all hosts"
NO_COMMAND = (126, 127)  # Exit codes of a shell for a command that it cannot run.
# What ssh or the shell there says, the cause, and the remedy.
CAUSES = (
    (
        r"IDENTIFICATION HAS CHANGED",
        "its key is not the one that ssh knows: it was installed anew, or is another machine",
        "ssh-keygen -R {host}, and ssh-keyscan {host} >> ~/.ssh/known_hosts, if you trust it",
    ),
    (
        r"Host key verification failed|No \S+ host key is known",
        "its key is not known to ssh here",
        "ssh-keyscan {host} >> ~/.ssh/known_hosts, if you trust this network",
    ),
    (
        r"Permission denied|Too many authentication failures",
        "it refuses the login",
        "ssh-copy-id {host}, or name the key with --ssh-identity-file",
    ),
    (
        r"Could not resolve hostname|Name or service not known",
        "its name has no address",
        "check the spelling, or give the address",
    ),
    (
        r"timed out during banner exchange|Connection to \S+ timed out",
        "its ssh server accepts connections and does not answer",
        "look into its log and its load, and try: ssh {host} true",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "the network does not lead to it",
        "check that it is up, and that no firewall is between",
    ),
    (
        r"Connection refused",
        "no ssh server listens there",
        "start sshd there, or name its port with --ssh-port",
    ),
    (
        r"Connection (closed|reset) by|kex_exchange_identification",
        "its ssh server closed the connection",
        "look into its log, and try: ssh {host} true",
    ),
    (
        r"prted: (No such file|not found|command not found)|orted: (No such|not found|command)",
        "Open MPI is not installed there at the same path",
        SAME_ENVIRONMENT,
    ),
    (
        r"No module named '?hvdlite|No module named '?msgpack",
        "hvdlite is not installed in the Python there",
        "make the same Python environment at the same path on all hosts",
    ),
    (
        r"(python|pypy)[\w.]*['\u2019]?: (No such file|not found|command not found|Permission)",
        "there is no Python at the path of this one",
        "make the same Python environment at the same path on all hosts",
    ),
    (
        r"ssh: (not found|command not found)|ssh.*(No such file|not found)|find.*agent.*ssh",
        "there is no ssh here",
        "install an ssh client",
    ),
)
HOSTS = (
    r"resolve hostname ([^\s:]+)",
    r"connect to host (\S+)",
    r"host key is known for (\S+)",
    r"(?:\w+@)([^\s:]+): Permission denied",
    r"Remote host:\s+(\S+)",
)
CANNOT_RUN = "this host "  # So an agent begins its last sentence, which has its own remedy.
START_FAILED = "daemon failed to report back"


def explain(host: str, said: str) -> str | None:
    """Return host, cause and remedy, from what ssh or the shell there has said; None if unknown."""
    for pattern, cause, remedy in CAUSES:
        if re.search(pattern, said):
            return _sentence(host, cause, remedy)
    return None


def explain_agent(host: str, said: str, code: int | None) -> str:
    """Return why the Python that was sent to `host` has not answered; it ended with `code`."""
    if code in NO_COMMAND:
        return _sentence(host, f"there is no Python at {sys.executable}", SAME_ENVIRONMENT)
    known = explain(host, said)
    if known is not None:
        return known
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if lines and lines[-1].startswith(CANNOT_RUN):
        return f"host {host} {lines[-1].removeprefix(CANNOT_RUN)}"
    last = f" and said: {lines[-1]}" if lines else ""
    return _sentence(host, f"the Python there {spell_end(code)}{last}",
                     f"try it by hand: ssh {{host}} {sys.executable} --version")  # fmt: skip


def explain_silence(host: str, seconds: float, *, runs: bool) -> str:
    """Return why there is no answer of a Python on `host`; `runs`: it has started."""
    if runs:
        cause = f"Python runs there, and has not answered in {seconds:g} seconds"
        remedy = "look whether its disk hangs, such as by: ssh {host} ls"
    else:
        cause = f"ssh connects, and has not started Python in {seconds:g} seconds"
        remedy = "look at what hangs there by: ssh {host} true"
    return _sentence(host, cause, remedy)


def spell_end(code: int | None) -> str:
    """Return how a process ended, by what `subprocess` tells of it."""
    if code is None:
        return "closed its connection"
    if code < 0:
        return f"was killed by {signal_name(-code)}"
    return f"ended with exit code {code}"


def has_not_answered(seconds: float) -> str:
    """Return what is wrong with a host that has been silent for a time."""
    return (
        f"has not answered for {seconds:g} seconds: the network between is cut, or the host is down"
    )


def diagnose(lines: Sequence[str]) -> str | None:
    """Return host, cause and remedy; None where `lines` do not tell of an unreachable host."""
    text = "\n".join(lines)
    if START_FAILED not in text and "ssh" not in text:
        return None
    found = (re.search(pattern, text) for pattern in HOSTS)
    host = next((match[1] for match in found if match), "")
    if known := explain(host, text):
        return known
    if START_FAILED in text and host:
        cause = "ssh works, but Open MPI cannot start there or connect back"
        return _sentence(host, cause, "open all ports between the hosts, or name the network with "
                                      "--network-interfaces")  # fmt: skip
    return None


def _sentence(host: str, cause: str, remedy: str) -> str:
    named = f"host {host}" if host else "a host"
    return f"{named} cannot be used: {cause}. Remedy: {remedy.format(host=host or 'HOST')}"
