"""IBM's jsrun, by pure functions: its hosts, its file of resources and its command line.

LSF on machines with jsrun runs a job's script on a launch node, which is listed as the first host,
with one slot; only jsrun reaches the others, the compute nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hvdlite.launcher.hosts.hosts import Host

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
