"""Who has started this process, as which rank of which job: a pure function of its environment.

| source | rank and size from | the ranks meet |
|---|---|---|
| ELASTIC | the driver, later than ``HVDLITE_RANK`` | through ``HVDLITE_ELASTIC_DRIVER`` |
| MPI | ``OMPI_COMM_WORLD_*``, ``PMIX_RANK``, ``PMI_*``, or MPI that runs | over MPI |
| OWN | ``HVDLITE_RANK``, ``HVDLITE_SIZE`` | at ``HVDLITE_RENDEZVOUS`` |
| TORCH_GROUP | the default process group of torch.distributed | in its store |
| TORCH_AGENT | ``RANK``, ``WORLD_SIZE`` | in the store of torchrun's agent |
| MASTER | ``RANK``, ``WORLD_SIZE`` | at ``MASTER_ADDR:MASTER_PORT`` |
| SLURM | ``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` | at a port of the step's first node |
| SINGLE | | one rank, which meets nobody |

The first of the table that is there counts, and nothing else is looked at after ELASTIC. One that
comes after it must say the same rank and size, since a rank that believes the wrong one waits for
others that do not exist. Slurm is the exception: a launcher may well run inside a Slurm task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address, parse_address
from hvdlite.common.meeting.launch import (
    DRIVER,
    ELASTIC,
    MASTER,
    MPI,
    OWN,
    RENDEZVOUS,
    SINGLE,
    SLURM,
    TORCH_AGENT,
    TORCH_GROUP,
    WORKER,
    Launch,
    WorldRank,
    first_number,
    first_set,
    launch_with,
    spell,
)
from hvdlite.common.meeting.nodelist import expand_nodelist

# -- Slurm: `srun` has started this process

# Above the ports that Linux gives to programs that ask for any. A job takes the first free one of
# PORTS, and each rank finds it by trying them all.
FIRST_PORT, LAST_PORT, PORTS = 61440, 65535, 16
# Slurm numbers a batch script and the shell of salloc from here on as steps.
NO_STEP = 0xFFFFFFF0


def task_of_step(environ: Mapping[str, str]) -> Launch | None:
    """Return the rank of a process that is a task of a step of several: `srun` has started it."""
    step = environ.get("SLURM_STEP_ID", "")
    size = first_set(environ, ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    if not step.isdecimal() or int(step) >= NO_STEP or not (environ.get("SLURM_PROCID") and size):
        return None
    launch = launch_with(environ, SLURM, "SLURM_PROCID", size)
    if launch.size == 1:
        return None
    job = environ.get("SLURM_JOB_ID", "0")
    nodes = environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES", "")
    first_node = next(iter(expand_nodelist(environ.get("SLURM_STEP_NODELIST", ""))), "")
    host = "localhost" if nodes == "1" else first_node
    if not host:
        raise ConfigError(
            f"{' and '.join(launch.evidence)} say that this is a task of Slurm, but "
            f"SLURM_STEP_NODELIST does not say on which nodes: set {RENDEZVOUS}=host:port"
        )
    # Neighbours in time have other ports.
    number = (int(job) if job.isdecimal() else 0) * PORTS + int(step) * 7
    first = FIRST_PORT + number % (LAST_PORT - FIRST_PORT - PORTS + 1)
    local = environ.get("SLURM_LOCALID", "")
    return replace(
        launch,
        local_rank=int(local) if local.isdecimal() else -1,
        job=f"{environ.get('SLURM_CLUSTER_NAME', '')}:{job}.{step}",
        addresses=tuple(Address(host, port) for port in range(first, first + PORTS)),
        rank_0_serves=True,
        incarnation=environ.get("SLURM_RESTART_COUNT", ""),
    )


LAUNCHED_BY_MPI = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS")
MPI_NUMBERS = (
    ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
)
LAUNCHER_EVENTS = "HVDLITE_LAUNCHER_EVENTS"  # It begins with a token of the job.
SERVER = "HVDLITE_RENDEZVOUS_SERVER"
INCARNATION = "HVDLITE_INCARNATION"
ROLE = "HVDLITE_ROLE"  # in a job with parameter servers


def detect(
    environ: Mapping[str, str], mpi: WorldRank | None = None, torch: WorldRank | None = None
) -> Launch:
    """Return the launch that `environ` describes.

    `mpi` is this process's place in MPI's world where MPI runs in it already, and `torch` that in
    the default group of torch.distributed, where there is one. Raises `ConfigError` for variables
    with impossible values, and for two sources that disagree, naming both.
    """
    if environ.get(DRIVER):
        return _elastic(environ)
    candidates = list(_candidates(environ, mpi, torch))
    if not candidates:
        _check_that_numbers_are_whole(environ)
        return Launch(SINGLE)
    chosen = candidates[0]
    for other in candidates[1:]:
        if other.source != SLURM:
            _check_that_they_agree(chosen, other)
    if chosen.size == 1 and chosen.source != MPI:
        return Launch(SINGLE, evidence=chosen.evidence)
    slurm = next((each for each in candidates if each.source == SLURM), None)
    if chosen.source != MPI or slurm is None:
        return chosen
    # A rank of MPI may be a task of its step itself.
    alike = chosen.rank in (-1, slurm.rank) and chosen.size in (-1, slurm.size)
    return replace(chosen, instead=slurm) if alike else chosen


def _check_that_numbers_are_whole(environ: Mapping[str, str]) -> None:
    """Raise `ConfigError` for a part of hvdlite's numbers: each rank would be a job of its own."""
    names = [name for name in ("HVDLITE_RANK", "HVDLITE_SIZE") if environ.get(name, "").strip()]
    if not names or environ.get("HVDLITE_SIZE", "").strip() == "1":
        return
    index = ("JOB_COMPLETION_INDEX",) if "JOB_COMPLETION_INDEX" in environ else ()
    given = " and ".join(spell(environ, *names, *index))
    raise ConfigError(
        f"{given}: this is a part of what a rank needs; set HVDLITE_RANK, HVDLITE_SIZE and "
        f"{RENDEZVOUS}=host:port, or none of them for a job of one rank"
    )


def _candidates(
    environ: Mapping[str, str], mpi: WorldRank | None, torch: WorldRank | None
) -> Iterator[Launch]:
    """Yield what each source says, the first one being the strongest."""
    slurm = task_of_step(environ)
    by_torch = None
    if torch is not None:
        evidence = (f"torch.distributed: rank {torch.rank} of {torch.size}",)
        by_torch = Launch(TORCH_GROUP, *torch, evidence=evidence)
    others = [_own(environ, slurm), by_torch, _ranks(environ, slurm), slurm]
    by_mpi = _mpi(environ)
    if by_mpi is None and mpi is not None and (mpi.size > 1 or not any(others)):
        # A single rank of MPI beside another source is a script that imports mpi4py.
        by_mpi = Launch(MPI, *mpi, evidence=(f"MPI.COMM_WORLD: rank {mpi.rank} of {mpi.size}",))
    for launch in (by_mpi, *others):
        if launch is not None:
            yield launch


def _check_that_they_agree(chosen: Launch, other: Launch) -> None:
    for mine, theirs in ((chosen.rank, other.rank), (chosen.size, other.size)):
        if mine != theirs and mine >= 0 and theirs >= 0:
            raise ConfigError(
                f"two launchers disagree about this process: {_spell(chosen)}, but "
                f"{_spell(other)}. Start the ranks with one of them only, or unset the variables "
                "of the other in the script that starts this process"
            )


def _spell(launch: Launch) -> str:
    return f"{' and '.join(launch.evidence)} (from {launch.source})"


# -- the sources


def _elastic(environ: Mapping[str, str]) -> Launch:
    """Return the launch of a worker, whose rank is the one at its start."""
    if not environ.get(WORKER, "").isdecimal():
        raise ConfigError(
            f"{DRIVER}={environ[DRIVER]} is set, but {WORKER} is not the number of a worker: start "
            "elastic jobs with hvdlite-run --min-np"
        )
    return Launch(
        ELASTIC,
        int(environ.get("HVDLITE_RANK") or 0),
        int(environ.get("HVDLITE_SIZE") or 1),
        job=f"worker {environ[WORKER]}",
        addresses=(parse_address(environ[DRIVER], DRIVER),),
        evidence=spell(environ, DRIVER, WORKER),
    )


def _mpi(environ: Mapping[str, str]) -> Launch | None:
    if not any(name in environ for name in LAUNCHED_BY_MPI):
        return None
    names = [first_number(environ, each) for each in MPI_NUMBERS]
    rank, size, local_rank, local_size = (int(environ[name]) if name else -1 for name in names)
    if "PMIX_NAMESPACE" in environ:
        job = environ["PMIX_NAMESPACE"]
    elif "PMI_RANK" in environ and "SLURM_STEP_ID" in environ:
        job = f"{environ.get('SLURM_JOB_ID', '')}.{environ['SLURM_STEP_ID']}"
    else:
        job = environ.get(LAUNCHER_EVENTS, "").partition(" ")[0]
    evidence = spell(environ, *filter(None, names[:2]))
    return Launch(MPI, rank, size, local_rank, local_size, job=job, evidence=evidence)


def _own(environ: Mapping[str, str], slurm: Launch | None) -> Launch | None:
    """Return what hvdlite's own variables say; the address may come with others' numbers."""
    numbers = [first_set(environ, ("HVDLITE_RANK",)), first_set(environ, ("HVDLITE_SIZE",))]
    if not environ.get(RENDEZVOUS):
        if not all(numbers):
            return None
        launch = launch_with(environ, OWN, *numbers)
        return launch if launch.size == 1 else _without_address(environ, launch)
    rank = first_set(environ, ("HVDLITE_RANK", "RANK", "JOB_COMPLETION_INDEX"))
    size = first_set(environ, ("HVDLITE_SIZE", "WORLD_SIZE"))
    if not (rank and size) and slurm is not None:
        launch = replace(slurm, source=OWN)
    elif not (rank and size):
        if (role := environ.get(ROLE, "worker")) != "worker":
            raise ConfigError(
                f"{ROLE}={role}: this process is a {role} of parameters, no rank, and its script "
                "calls hvd.init(). Call ps.init() first, or leave --ps-servers out"
            )
        missing = "this rank (HVDLITE_RANK)" if size else "the number of ranks (HVDLITE_SIZE)"
        raise ConfigError(f"{RENDEZVOUS}={environ[RENDEZVOUS]} is set, but nothing says {missing}")
    else:
        launch = launch_with(environ, OWN, rank, size)
    address = parse_address(environ[RENDEZVOUS], RENDEZVOUS)
    external = bool(address.path) or environ.get(SERVER, "").lower() == "external"
    return replace(
        launch, job=environ[RENDEZVOUS], addresses=(address,), rank_0_serves=not external,
        incarnation=environ.get(INCARNATION, ""),
    )  # fmt: skip


def _without_address(environ: Mapping[str, str], launch: Launch) -> Launch:
    """Return the launch of a rank with numbers, and with the address of torch's variables or none.

    Ranks under MPI have hvdlite's numbers as well, and meet over MPI.
    """
    if _mpi(environ) is not None:
        return launch
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return _at_master(environ, launch)
    raise ConfigError(
        f"{' and '.join(launch.evidence)} say that this is a rank of a job, but not where the "
        f"ranks meet: set {RENDEZVOUS}=host:port to a free port on the host of rank 0"
    )


def _ranks(environ: Mapping[str, str], slurm: Launch | None) -> Launch | None:
    """Return what torchrun's variables say, which many launchers set."""
    if not (environ.get("RANK") and environ.get("WORLD_SIZE")):
        return None
    launch = launch_with(environ, MASTER, "RANK", "WORLD_SIZE")
    if launch.size == 1:
        return launch
    if environ.get("MASTER_ADDR") and environ.get("MASTER_PORT"):
        return _at_master(environ, launch)
    if environ.get(RENDEZVOUS) or _mpi(environ) is not None or environ.get("HVDLITE_RANK"):
        return launch
    if slurm is not None and (slurm.rank, slurm.size) == (launch.rank, launch.size):
        return slurm
    raise ConfigError(
        f"{' and '.join(launch.evidence)} say that this is a rank of a job, but not where the "
        f"ranks meet: set MASTER_ADDR and MASTER_PORT, or {RENDEZVOUS}=host:port"
    )


def _at_master(environ: Mapping[str, str], launch: Launch) -> Launch:
    host, port = environ["MASTER_ADDR"], environ["MASTER_PORT"]
    text = f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("true", "1")
    run = [environ.get(name, "") for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")]
    local = [environ.get(name, "") for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    local_rank, local_size = (int(each) if each.isdecimal() else -1 for each in local)
    return replace(
        launch,
        source=TORCH_AGENT if agent else launch.source,
        local_rank=local_rank,
        local_size=local_size,
        job=" ".join([text, *run]).strip(),
        addresses=(parse_address(text, "MASTER_ADDR:MASTER_PORT"),),
        rank_0_serves=not agent,
        incarnation=environ.get(INCARNATION) or " ".join(run).strip(),
    )
