"""IBM's jsrun, by pure functions: its hosts, its file of resources and its command line.

LSF on machines with jsrun runs a job's script on a launch node, which is listed as the first host,
with one slot; only jsrun reaches the others, the compute nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts import Host

TASK_NUMBER = "JSM_NAMESPACE_RANK"  # The variable that tells a task its place in the file.
# Tasks of one node share its GPUs and its memory; the local rank chooses the GPU.
HEADER = "overlapping_rs: allow\ncpu_index_using: logical\n"


def compute_hosts(hosts: Sequence[Host]) -> tuple[Host, ...]:
    """Return the hosts of an LSF allocation without the launch node.

    The launch node is the first host, if that one has a single slot and all others have more.
    """
    first, others = hosts[0], tuple(hosts[1:])
    if others and first.slots == 1 and all(host.slots > 1 for host in others):
        return others
    return tuple(hosts)


def resource_file(hosts: Sequence[Host], counts: Sequence[int], threads_per_core: int = 1) -> str:
    """Return the text for ``--erf_input``: `counts` tasks on each host, in the order of the hosts.

    A slot is a core with `threads_per_core` logical processors. The tasks of a host share its
    processors evenly; each has one at least. Raises `ConfigError` where a host has too few.
    """
    lines: list[str] = []
    for host, count in zip(hosts, counts, strict=True):
        for processors in _shares(host, count, threads_per_core):
            lines.append(
                f"rank: {len(lines)}: {{ hostname: {host.name}; cpu: {{{processors}}} ; "
                "gpu: * ; mem: * }"
            )
    return "\n".join([HEADER, *lines, ""])


def _shares(host: Host, count: int, threads_per_core: int) -> Iterator[str]:
    """Yield the range of logical processors of each task of a host."""
    if count > host.slots:
        raise ConfigError(
            f"jsrun: {count} ranks on {host.name} are more than its {host.slots} slots: "
            "take fewer ranks, or more hosts"
        )
    share = host.slots // count * threads_per_core if count else 0
    for task in range(count):
        yield f"{task * share}-{(task + 1) * share - 1}"


def jsrun_command(program: str, resources: str, command: Sequence[str]) -> list[str]:
    """Return the command that starts `command` once for each line of the file `resources`."""
    return [program, "--erf_input", resources, *command]
