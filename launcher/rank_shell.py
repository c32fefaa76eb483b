"""The shell that stands around each rank: it connects the rank with the launcher.

An mpirun that lets the other ranks speak when one fails does not say which one failed, so this
shell does. Towards mpirun it always succeeds: Open MPI counts a process that fails twice, and ends
the job while the last ranks still run. On the launcher's host, events and output travel through
named pipes in the launcher's private directory; elsewhere they go through mpirun, and events are
lines of standard error that start with a token. Ranks have an empty standard input: what Open MPI
passes on may get lost, and its end, too. A shell, because it starts in a millisecond.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

SCRIPT = """\
token={token}
rank=${rank_variable}
boot=
where=there
{{ read -r boot <{boot_file}; }} 2>/dev/null
if [ "$boot" = "{boot}" ] && [ -p {directory}/"$rank.stderr" ]; then
    where=here
    exec 4>{directory}/events
else
    exec 4>&2
fi
printf '%s start %s %s %s\\n' "$token" "$rank" "$$" "$where" >&4
if [ "$where" = here ]; then
    exec 1>{directory}/"$rank.stdout" 2>{directory}/"$rank.stderr"
    HVDLITE_LAUNCHER_EVENTS="$token $rank "{directory}/events
    export HVDLITE_LAUNCHER_EVENTS
fi
trap : HUP INT TERM
trap '' USR1  # MPICH's way to tell of a lost rank; it would end a process that does not care
exec 3>&2 2>/dev/null  # the shell itself has nothing to say, such as: Terminated
(exec 0</dev/null 2>&3 3>&- 4>&-; exec "$@")
code=$?
printf '%s exit %s %s\\n' "$token" "$rank" "$code" >&4
exit 0
"""
BOOT_FILE = "/proc/sys/kernel/random/boot_id"


def boot_id() -> str:
    """What tells this running kernel from that of another host; empty where there is none."""
    try:
        with open(BOOT_FILE, encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def wrap(command: Sequence[str], *, token: str, rank_variable: str, directory: str) -> list[str]:
    """The command that runs `command` as a rank."""
    script = SCRIPT.format(
        token=token,
        rank_variable=rank_variable,
        directory=shlex.quote(directory),
        boot=boot_id(),
        boot_file=BOOT_FILE,
    )
    return ["/bin/sh", "-c", script, "hvdlite-rank", *command]
