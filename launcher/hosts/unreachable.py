"""Why a host could not be reached, from what ssh, a shell or Open MPI say, in one sentence.

This module never reads or writes anything.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Sequence

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
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def silent_host(line: str) -> str | None:
    """Return the host that ssh has given up, as ssh was given it, from a line that ssh prints."""
    match = re.match(r"Timeout, server (\S+) not responding", line)
    return match[1] if match else None


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
