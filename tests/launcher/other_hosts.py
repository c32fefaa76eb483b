"""Other hosts that are this one: a program in the place of ssh runs commands under their name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hvdlite.launcher.hosts.ssh import AGENT_MODULE
from tests.launcher.jobs import RANK, processes

# Options, host, command. A command there runs in the root directory, as after a login elsewhere. A
# host has a name of its own where a namespace may be made for it.
SSH = """\
#!/bin/sh
echo "$$ $*" >>"{log}"
while :; do
    case $1 in
    -T) shift ;;
    -o | -p | -i) shift 2 ;;
    --) break ;;
    *) echo "ssh would take $1 for a flag where it begins with -" >&2; exit 255 ;;
    esac
done
shift
host=$1
shift
cd /
{before}
exec {namespace} sh -c "{hostname} $*"
"""


def may_have_names() -> bool:
    """Return whether a process may get a hostname of its own."""
    command = ["unshare", "--uts", "hostname", "x"]
    try:
        return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 0
    except FileNotFoundError:
        return False


HAVE_NAMES = may_have_names()


def make_ssh(folder: Path, before: str = "") -> dict[str, str]:
    """Make the program, which first does `before`; return the variables that let a job find it."""
    program = folder / "bin" / "ssh"
    program.parent.mkdir(exist_ok=True)
    text = SSH.format(
        log=folder / "ssh.log",
        before=before,
        namespace="unshare --uts" if HAVE_NAMES else "",
        hostname="hostname $host;" if HAVE_NAMES else "",
    )
    program.write_text(text)
    program.chmod(0o755)
    return {"PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"}


def calls(folder: Path) -> list[str]:
    """Return the command lines by which ssh was called."""
    return [line.partition(" ")[2] for line in (folder / "ssh.log").read_text().splitlines()]


def python(script: str) -> tuple[str, ...]:
    """Return the command of a rank that runs a script, which knows `rank`."""
    return (sys.executable, "-c", RANK + script)


def agents(mark: str) -> list[int]:
    """Return the process ids of the agents of a job."""
    return [number for number, line in processes(mark).items() if AGENT_MODULE in line]
