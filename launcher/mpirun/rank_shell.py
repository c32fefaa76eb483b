"""The shell that stands around each rank: it connects the rank with the launcher.

An mpirun that lets the other ranks speak when one fails does not say which one failed, so this
shell does. Towards mpirun it always succeeds: Open MPI counts a process that fails twice, and ends
the job while the last ranks still run. On the launcher's host, events and output go through
named pipes in the launcher's private directory; elsewhere they go through mpirun, and events are
lines of standard error that start with a token. The shell also tells a rank its place in the job,
and how many threads it may use there. Ranks have an empty standard input: what Open MPI passes on
may get lost, and its end, too. A shell, because it starts in a millisecond.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hvdlite.common.meeting.placement import BOOT_ID, boot_id
from hvdlite.launcher.hosts.resources import SHELL as VISIBLE_DEVICES
from hvdlite.launcher.hosts.resources import count_cores_script
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI, SLURM

# Finds out whether this is the launcher's host, and connects the rank.
CONNECT = """\
token={token}
rank=${rank}
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
HVDLITE_LAUNCHER_EVENTS="$token $rank -"
if [ "$where" = here ]; then
    exec 1>{directory}/"$rank.stdout" 2>{directory}/"$rank.stderr"
    HVDLITE_LAUNCHER_EVENTS="$token $rank "{directory}/events
    {here}
fi
export HVDLITE_LAUNCHER_EVENTS
"""
# Sets size, local_rank, local_size, cross_rank and cross_size; a variable stays empty where its
# value is not known. `counts` are the ranks of each host, `host` is the index of this one.
PLACE = """\
size=${{{size}:-{ranks}}}
local_rank=${local_rank}
local_size=${local_size}
counts="{counts}"
host=${host}
IFS=,
for part in ${tasks_per_host}; do  # such as 2(x3),1
    times=1
    case $part in *x*) times=${{part##*x}} times=${{times%)}} ;; esac
    while [ "$times" -gt 0 ]; do
        counts="$counts ${{part%%(*}}" times=$((times - 1))
    done
done
unset IFS
known=yes
if [ -z "$host" ]; then  # the hosts are filled in their order
    host=0 first=0
    for count in $counts; do
        [ "$rank" -lt $((first + count)) ] && break
        first=$((first + count)) host=$((host + 1))
    done
    : "${{local_rank:=$((rank - first))}}"
    [ "$local_rank" = $((rank - first)) ] || known=  # the MPI has placed the ranks in another way
fi
cross_rank=0 cross_size=0 index=0 here_count=
for count in $counts; do
    if [ "$count" -gt "$local_rank" ]; then
        [ "$index" -lt "$host" ] && cross_rank=$((cross_rank + 1))
        cross_size=$((cross_size + 1))
    fi
    [ "$index" -eq "$host" ] && here_count=$count
    index=$((index + 1))
done
# Open MPI 5 tells the ranks of the first host the size of another one.
if [ "$known" ] && [ "$here_count" ]; then local_size=$here_count; else cross_rank= cross_size=; fi
for prefix in {prefixes}; do
    export "${{prefix}}_RANK=$rank" "${{prefix}}_SIZE=$size"
    export "${{prefix}}_LOCAL_RANK=$local_rank" "${{prefix}}_LOCAL_SIZE=$local_size"
    [ -n "$cross_size" ] && export "${{prefix}}_CROSS_RANK=$cross_rank"
    [ -n "$cross_size" ] && export "${{prefix}}_CROSS_SIZE=$cross_size"
done
"""
TORCHRUN = """\
export RANK="$rank" WORLD_SIZE="$size" LOCAL_RANK="$local_rank" LOCAL_WORLD_SIZE="$local_size"
"""
# Cores that the affinity mask gives are shared by the ranks of the host, unless each is bound to
# some of its own; the limit of a container is always shared.
THREADS = """\
if [ -z "$OMP_NUM_THREADS" ]; then
{count_cores}    : "${{local_size:={most_local_ranks}}}"
    share=$((quota / local_size))
    own=$(({bound} ? cores : cores / local_size))
    [ "$own" -lt "$share" ] && share=$own
    [ "$share" -ge 1 ] || share=1
    export OMP_NUM_THREADS="$share"
fi
"""
RUN = """\
trap : HUP INT TERM
trap '' USR1  # MPICH's way to tell of a lost rank; it would end a process that does not care
exec 3>&2 2>/dev/null  # the shell itself has nothing to say, such as: Terminated
(exec 0</dev/null 2>&3 3>&- 4>&-; {debug}exec "$@")
code=$?
printf '%s exit %s %s\\n' "$token" "$rank" "$code" >&4
exit 0
"""
# A debugger in any other rank would find the end of its input, and end that rank.
DEBUG = """\
if [ "$rank" = {rank} ]; then exec {redirect}; else export PYTHONBREAKPOINT=0; fi
"""
# Which variables tell a rank its place; where an MPI has none, the name is one that nobody sets.
PLACE_VARIABLES = {
    OPENMPI: {
        "rank": "OMPI_COMM_WORLD_RANK",
        "size": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    HYDRA: {
        "rank": "PMI_RANK",
        "size": "PMI_SIZE",
        "local_rank": "MPI_LOCALRANKID",
        "local_size": "MPI_LOCALNRANKS",
    },
    SLURM: {
        "rank": "SLURM_PROCID",
        "size": "SLURM_NTASKS",
        "local_rank": "SLURM_LOCALID",
        "host": "SLURM_NODEID",
        "tasks_per_host": "SLURM_STEP_TASKS_PER_NODE",
    },
}
UNSET = "hvdlite_unset"
WANTED = ("rank", "size", "local_rank", "local_size", "host", "tasks_per_host")


@dataclass(frozen=True, kw_only=True)
class RankShell:
    """What the shell of a rank has to know."""

    token: str  # what marks an event
    kind: str  # of the MPI
    directory: str  # of the job, on the launcher's host
    ranks: int
    counts: tuple[int, ...] = ()  # ranks of each host; empty: nobody knows, or Slurm says it
    most_local_ranks: int = 1
    bound: bool = False  # each rank is bound to cores of its own
    prefixes: tuple[str, ...] = ("HVDLITE",)  # of the variables that tell a rank its place
    torchrun: bool = False  # set those of torchrun, too
    here: Mapping[str, str] = field(default_factory=dict)  # variables on the launcher's host
    debug_rank: int | None = None
    debug_redirect: str = ""  # redirections of that rank

    def wrap(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs `command` as a rank."""
        return ["/bin/sh", "-c", self.script(), "hvdlite-rank", *command]

    def script(self) -> str:
        names = {name: PLACE_VARIABLES[self.kind].get(name, UNSET) for name in WANTED}
        here = [f"export {name}={shlex.quote(value)}" for name, value in self.here.items()]
        debug = ""
        if self.debug_rank is not None:
            debug = DEBUG.format(rank=self.debug_rank, redirect=self.debug_redirect)
        return "".join([
            CONNECT.format(
                token=self.token,
                rank=names["rank"],
                boot=boot_id(),
                boot_file=BOOT_ID,
                directory=shlex.quote(self.directory),
                here="; ".join(here) or ":",
            ),
            PLACE.format(
                **names,
                ranks=self.ranks,
                counts=" ".join(map(str, self.counts)),
                prefixes=" ".join(self.prefixes),
            ),
            TORCHRUN if self.torchrun else "",
            VISIBLE_DEVICES,
            THREADS.format(
                count_cores=count_cores_script(),
                most_local_ranks=self.most_local_ranks,
                bound=int(self.bound),
            ),
            RUN.format(debug=debug),
        ])  # fmt: skip
