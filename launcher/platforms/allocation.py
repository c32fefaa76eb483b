"""The hosts that a batch system has given to this job: Slurm, LSF, PBS or Grid Engine.

The functions read variables of the environment, and the files that those name; they start nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.plain.nodelist import expand_counts, expand_nodelist
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
