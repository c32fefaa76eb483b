"""The hosts that Slurm, LSF, PBS or Grid Engine has given to this job, and its programs there.

The functions read variables of the environment, and the files that those name; they start nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.meeting.nodelist import expand_counts, expand_nodelist
from hvdlite.launcher.hosts.hosts import Host

SLURM, LSF, PBS, GRID_ENGINE = "Slurm", "LSF", "PBS", "Grid Engine"
# By its name, the variable that a batch system sets in its jobs, and those that name the hosts. The
# first of these that is set counts.
MARKS = {SLURM: "SLURM_JOB_ID", LSF: "LSB_JOBID", PBS: "PBS_NODEFILE", GRID_ENGINE: "PE_HOSTFILE"}
SOURCES = {
    SLURM: ("SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    LSF: ("LSB_DJOB_HOSTFILE", "LSB_MCPU_HOSTS", "LSB_HOSTS"),
    PBS: ("PBS_NODEFILE",),
    GRID_ENGINE: ("PE_HOSTFILE",),
}
MOST_NAMED = 6
REMEDY = "name the hosts with -H or --hostfile"


@dataclass(frozen=True)
class Allocation:
    """What a batch system has given to this job. `source` is the variable that says so."""

    system: str
    source: str
    hosts: tuple[Host, ...]

    def __str__(self) -> str:
        hosts = ",".join(map(str, self.hosts[:MOST_NAMED]))
        more = len(self.hosts) - MOST_NAMED
        return f"{self.system}'s {hosts}{f' and {more} more hosts' if more > 0 else ''}"

    @property
    def slots(self) -> int:
        """The number of ranks that fit in."""
        return sum(host.slots for host in self.hosts)


def find_allocation(environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation that this process is in; None where there is none.

    Raises `ConfigError` that names the variable where its text or its file is not understood: a job
    that was given several hosts must never run on the first of them alone without a word.
    """
    for system, mark in MARKS.items():
        if system == SLURM and is_task(environ):
            continue  # of several that a step started: the others have the other nodes
        source = next((name for name in SOURCES[system] if environ.get(name)), None)
        if environ.get(mark) and source is not None:
            hosts = _without_duplicates(_read(source, environ), f"{source}={environ[source]}")
            return Allocation(system, source, hosts)
    return None


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this process together with others.

    A batch script, a command of salloc and a shell that srun alone has started may use all nodes.
    """
    tasks = environ.get("SLURM_STEP_NUM_TASKS") or environ.get("SLURM_NTASKS", "")
    return bool(environ.get("SLURM_STEP_ID")) and tasks.isdecimal() and int(tasks) > 1


def _read(source: str, environ: Mapping[str, str]) -> Iterable[tuple[str, int]]:
    """Yield names and slots as `source` lists them; a name may come several times."""
    text = environ[source]
    if source in SOURCES[SLURM]:
        return _slurm_slots(text, environ)
    if source == "LSB_MCPU_HOSTS":
        return _pairs(text, source)
    if source == "LSB_HOSTS":
        return ((name, 1) for name in text.split())
    lines = _lines(text, source)
    if source == "PE_HOSTFILE":  # name, slots, queue and processors
        return (slot for line in lines for slot in _pairs(" ".join(line.split()[:2]), source))
    return ((line.split()[0], 1) for line in lines)  # one line for each slot


def _slurm_slots(nodes: str, environ: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    source, divisor = "SLURM_TASKS_PER_NODE", 1
    if environ.get("SLURM_STEP_ID"):  # In a shell that srun has started, these are the step's.
        source, cpus = "SLURM_JOB_CPUS_PER_NODE", environ.get("SLURM_CPUS_PER_TASK", "")
        divisor = int(cpus) if cpus.isdecimal() and int(cpus) else 1
    names, said = expand_nodelist(nodes), environ.get(source, "")
    counts = expand_counts(said) or (1,) * len(names)
    if len(names) != len(counts):
        raise ConfigError(
            f"Slurm names {len(names)} nodes ({nodes}), but {source}={said} speaks of "
            f"{len(counts)}: {REMEDY}, or unset {source}"
        )
    return ((name, max(1, count // divisor)) for name, count in zip(names, counts, strict=True))


def _pairs(text: str, source: str) -> Iterator[tuple[str, int]]:
    words = text.split()
    if len(words) % 2 or not all(slots.isdecimal() and int(slots) for slots in words[1::2]):
        raise ConfigError(f"{source}: {text!r} is no list of names and slots: {REMEDY}")
    return ((name, int(slots)) for name, slots in zip(words[::2], words[1::2], strict=True))


def _lines(path: str, source: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: cannot read {path}: {error}: {REMEDY}") from None
    return [line for line in lines if line.strip()]


def _without_duplicates(slots: Iterable[tuple[str, int]], said: str) -> tuple[Host, ...]:
    """Return each host once, in the order of the first mention, with the sum of its slots."""
    sums: Counter[str] = Counter()
    for name, number in slots:
        sums[name] += number
    if not sums:
        raise ConfigError(f"{said} names no host: {REMEDY}")
    return tuple(Host(name, number) for name, number in sums.items())


# The step of Slurm that starts one agent on each node.
#
# A step takes its shape from flags and from variables that sbatch and salloc have set for the tasks
# of the job; those must not shape a step of agents. Nor may ranks see the step of their agent:
# tools would take its tasks for the ranks. They are told their own place in Slurm's words instead.


# What srun reads as if it were a flag.
SHAPES_A_STEP = re.compile(
    r"SLURM_(N?TASKS.*|NPROCS|CPUS_PER_.*|GPUS?_PER_.*|GPU_(BIND|FREQ)|GPUS|TRES_.*|GRES.*|MEM_.*"
    r"|(CPU|MEM)_BIND.*|DISTRIBUTION|HOSTFILE|HINT|EXACT|WHOLE|OVERLAP|CORE_SPEC|THREAD_SPEC"
    r"|THREADS_PER_CORE|LABELIO|UNBUFFEREDIO|STD(IN|OUT|ERR)MODE|KILL_BAD_EXIT|MULTI|PTY|WAIT"
    r"|WORKING_DIR|REMOTE_CWD|MPI_TYPE|EXPORT_ENV|IMMEDIATE|NO_KILL|OVERCOMMIT|RELATIVE|TASK_.*"
    r"|STEP_.*|STEPID|PROCID|LOCALID|NODEID|GTIDS)|SRUN_.*"
)
# What a step tells its tasks about themselves.
TELLS_OF_A_STEP = re.compile(
    r"SLURM_(STEP.*|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|N?TASKS.*|NPROCS|SRUN_COMM_.*|PRIO_PROCESS"
    r"|LAUNCH_NODE_IPADDR|(CPU|MEM|GPU)_BIND.*|DISTRIBUTION|TOPOLOGY_.*|UMASK|MPI_TYPE|PMIX.*)"
    r"|SRUN_.*"
)
NODE_NAME = "SLURMD_NODENAME"  # Set in tasks: the name of the node in Slurm's lists.
# Said where a cluster binds no task in any case.
NOISE = re.compile(r"srun: cluster configuration lacks support for cpu binding\s*\n?")


def agents_command(
    program: str, nodes: Sequence[str], added: Sequence[str], command: Sequence[str]
) -> list[str]:
    """Return the command line that starts `command` once on each of `nodes`.

    `added` are flags of the user's.
    The step may use all that the job has there, and shares it with other steps. Its tasks are bound
    to nothing: the agents see to that.
    """
    number = len(nodes)
    return [
        program,
        f"--nodes={number}",
        f"--ntasks={number}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(nodes)}",
        "--overlap",
        "--mem=0",  # all that the job has
        "--cpu-bind=none",
        "--mpi=none",
        "--export=ALL",
        "--input=none",
        "--chdir=/",  # no file of the user's shadows a module
        "--kill-on-bad-exit=0",  # other agents may say what happened
        "--wait=0",
        *added,
        *command,
    ]


def agents_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of srun: `environ` less what would shape the step."""
    return {name: text for name, text in environ.items() if not SHAPES_A_STEP.fullmatch(name)}


def without_step(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without what tells of a step: what a batch script would see."""
    return {name: text for name, text in environ.items() if not TELLS_OF_A_STEP.fullmatch(name)}


def mpi_plugins(said: str) -> frozenset[str]:
    """Return the names that ``srun --mpi=list`` has printed."""
    words = re.findall(r"^\s*(?:srun: )?(\w+)\s*$", said, re.MULTILINE)
    return frozenset(words)


# IBM's jsrun, by pure functions: its hosts, and its file of resources.
#
# LSF on machines with jsrun runs a job's script on a launch node, which is listed as the first
# host, with one slot; only jsrun reaches the others, the compute nodes.


TASK_NUMBER = "JSM_NAMESPACE_RANK"  # The variable that tells a task its place in the file.
HEADER = "overlapping_rs: allow\ncpu_index_using: logical\n"


def compute_hosts(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts of an LSF allocation without the launch node.

    The launch node is the first host, if that one has a single slot and all others have more.
    """
    first, others = hosts[0], tuple(hosts[1:])
    if others and first.slots == 1 and all(host.slots > 1 for host in others):
        return others
    return tuple(hosts)


def resource_file(hosts: Sequence[Host], threads_per_core: int = 1) -> str:
    """Return the text for ``--erf_input``: one task on each host, with all that the job has there.

    A slot is a core with `threads_per_core` logical processors.
    """
    lines = [
        f"rank: {number}: {{ hostname: {host.name}; cpu: {{0-{host.slots * threads_per_core - 1}}} "
        "; gpu: * ; mem: * }"
        for number, host in enumerate(hosts)
    ]
    return "\n".join([HEADER, *lines, ""])
