"""The step of Slurm that starts one agent on each node, by pure functions.

A step takes its shape from flags and from variables that sbatch and salloc have set for the tasks
of the job; those must not shape a step of agents. Nor may ranks see the step of their agent: tools
would take its tasks for the ranks. They are told their own place in the words of Slurm instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hvdlite.launcher.hosts.hosts import Host

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


def lacks_plugin(said: str) -> bool:
    """Return whether srun has refused ``--mpi``, by what it has said."""
    return "Invalid MPI type" in said


# IBM's jsrun, by pure functions: its hosts, its file of resources and its command line.
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


def jsrun_command(program: str, resources: str, command: Sequence[str]) -> list[str]:
    """Return the command that starts `command` once for each line of the file `resources`."""
    return [program, "--erf_input", resources, *command]
