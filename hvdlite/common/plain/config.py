"""Every setting of hvdlite, declared once.

A field of `Config` gives the environment variable, its ``HOROVOD_`` alias, the launcher's flag,
the key in the YAML file, the help text and the row of the table in the docs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.segmentation.parsing import read_strategy
from hvdlite.common.segmentation.strategies import JOB_THRESHOLD_BYTES

PREFIX = "HVDLITE_"
ALIAS_PREFIX = "HOROVOD_"
MIB = 1 << 20


@dataclass(frozen=True)
class Setting:
    """Where a `Config` field is read from, and what it accepts."""

    name: str  # the field of Config
    default: Any
    env: str  # without the prefix
    parse: Callable[[str], Any]  # text -> value; ValueError says what is accepted
    help: str
    flag: str | None = None  # of hvdlite-run; None: environment only
    no_flag: str | None = None  # the flag that turns a boolean off
    yaml: str | None = None  # dotted key in the config file
    yaml_inverted: bool = False  # the key says true where the variable says 0
    flag_scale: int = 1  # a flag's (and a YAML key's) unit, in units of the variable
    alias: bool = True  # HOROVOD_<env> is honoured

    @property
    def variable(self) -> str:
        """The environment variable that sets it."""
        return PREFIX + self.env

    @property
    def variables(self) -> tuple[str, ...]:
        """The variables that set it, the one that wins first."""
        return (self.variable, ALIAS_PREFIX + self.env) if self.alias else (self.variable,)

    def read(self, text: str, source: str) -> Any:
        """Parse `text`, which came from `source`; raises `ConfigError` naming the source."""
        try:
            return self.parse(text)
        except ValueError as error:
            raise ConfigError(f"{source}={text!r}: {error}") from None

    def variable_text(self, text: str, source: str) -> str:
        """Return the value of the variable for the flag or YAML key `source` with the value `text`.

        Raises `ConfigError` naming the source.
        """
        try:
            scaled = text if self.flag_scale == 1 else _scale(text, self.flag_scale)
            self.parse(scaled)
        except ValueError as error:
            raise ConfigError(f"{source}={text!r}: {error}") from None
        return scaled


def _scale(text: str, scale: int) -> str:
    try:
        return str(round(float(text) * scale))
    except (OverflowError, ValueError):
        raise ValueError("must be a number") from None


def boolean(text: str) -> bool:
    """0/1 (any integer, as Horovod), true/false, yes/no, on/off."""
    lowered = text.strip().lower()
    if lowered in ("true", "yes", "on"):
        return True
    if lowered in ("false", "no", "off", ""):
        return False
    try:
        return int(lowered) > 0
    except ValueError:
        raise ValueError("must be 0 or 1 (or true, false, yes, no, on, off)") from None


def number(
    kind: type, minimum: float, unit: str, maximum: float = math.inf
) -> Callable[[str], Any]:
    """Make a parser of an int or float of at least `minimum`, at most `maximum`, in `unit`."""
    what = "a whole number" if kind is int else "a number"

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise ValueError(f"must be {what} ({unit})") from None
        if not minimum <= value <= maximum or math.isinf(value):
            most = "" if math.isinf(maximum) else f" and at most {maximum:g}"
            raise ValueError(f"must be {what} of at least {minimum:g}{most} ({unit})")
        return value

    return parse


def choice(*values: str) -> Callable[[str], str]:
    """Make a parser of one of `values`, in any case."""

    def parse(text: str) -> str:
        lowered = text.strip().lower()
        if lowered not in values:
            raise ValueError("must be one of " + ", ".join(values))
        return lowered

    return parse


def core_list(text: str) -> tuple[int, ...]:
    """Comma-separated core numbers, one for each local rank."""
    try:
        cores = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        cores = (-1,)
    if not cores or any(core < 0 for core in cores):
        raise ValueError("must be a comma-separated list of core numbers, such as 0,1,2,3")
    return cores


def name_list(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError("must be a comma-separated list, and names nothing")
    return names


def port_range(text: str) -> tuple[int, int]:
    """Port range, such as 12000-12100, or one port."""
    first, dash, last = text.partition("-")
    try:
        ports = int(first), int(last if dash else first)
    except ValueError:
        ports = (0, 0)
    if not 0 < ports[0] <= ports[1] < 1 << 16:
        raise ValueError("must be a range of ports from 1 to 65535, such as 12000-12100")
    return ports


def segmentation(text: str) -> str:
    """Check the spelling of a segmentation strategy."""
    read_strategy(text)
    return text


def trace_path(text: str) -> str:
    """Check the path of an iteration trace, whose suffix names its format."""
    if not text.endswith((".csv", ".parquet")):
        raise ValueError("must be a file name that ends with .csv or .parquet")
    return text


def setting(default: Any, env: str, parse: Callable[[str], Any], help: str, **where: Any) -> Any:
    """Make a dataclass field that carries its `Setting`."""
    return field(default=default, metadata={"setting": (env, parse, help, where)})


DATA_PLANES = ("auto", "shm", "ring", "mpi")
ALLREDUCES = (
    "auto", "shm", "ring", "hierarchical", "trees", "halving", "two_level", "doubling", "mpi",
)  # fmt: skip
LAUNCHERS = ("auto", "ssh", "srun", "jsrun", "mpirun")
TRANSPORTS = ("auto", "tcp", "mpi")
ADMISSIONS = ("ready", "wait")
PS_WORKERS = ("mpi", "independent")
NATIVE = ("auto", "on", "off")
COMPLETIONS = ("auto", "stream", "host")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one rank. Units end the names."""

    fusion_threshold_bytes: int = setting(
        JOB_THRESHOLD_BYTES, "FUSION_THRESHOLD", number(int, 0, "bytes"),
        "Most bytes that are fused into one segment; 0 turns fusion off.",
        flag="--fusion-threshold-mb", yaml="params.fusion_threshold_mb", flag_scale=MIB,
    )  # fmt: skip
    segmentation: str = setting(
        "threshold", "SEGMENTATION", segmentation,
        "Which gradients are reduced together: threshold[:MB], size:60,20,20 (percent), "
        "index:28,60,160, mb:16[,50], count:50, or auto[:FILE].",
        flag="--segmentation", yaml="params.segmentation", alias=False,
    )  # fmt: skip
    cycle_time_ms: float = setting(
        1.0, "CYCLE_TIME", number(float, 0, "milliseconds"),
        "Longest time in which more tensors may gather while nobody waits for one; 0: none.",
        flag="--cycle-time-ms", yaml="params.cycle_time_ms",
    )  # fmt: skip
    cache_capacity: int = setting(
        1024, "CACHE_CAPACITY", number(int, 0, "tensors"),
        "Negotiated tensors that are remembered, per process set; 0 turns the response cache off.",
        flag="--cache-capacity", yaml="params.cache_capacity",
    )  # fmt: skip
    allreduce: str = setting(
        "auto", "ALLREDUCE", choice(*ALLREDUCES),
        "How allreduce moves bytes: auto, shm, ring, hierarchical (rings between hosts), trees, "
        "halving, two_level or doubling (these between hosts), or mpi.",
        flag="--allreduce", yaml="params.allreduce", alias=False,
    )  # fmt: skip
    network_model: str = setting(
        "auto", "NETWORK_MODEL", str,
        "What the choice of allreduce between hosts goes by: a file that python -m hvdlite.bench "
        "has written, of rank 0; auto (the one in ~/.config/hvdlite if there is one), or default.",
        flag="--network-model", yaml="params.network_model", alias=False,
    )  # fmt: skip
    data_plane: str = setting(
        "auto", "DATA_PLANE", choice(*DATA_PLANES),
        "How the other collectives move bytes: auto, shm, ring or mpi.",
        flag="--data-plane", yaml="params.data_plane", alias=False,
    )  # fmt: skip
    hierarchical_allreduce: bool = setting(
        False, "HIERARCHICAL_ALLREDUCE", boolean,
        "Horovod's spelling of HVDLITE_ALLREDUCE=hierarchical.",
        flag="--hierarchical-allreduce", no_flag="--no-hierarchical-allreduce",
        yaml="params.hierarchical_allreduce",
    )  # fmt: skip
    disable_group_fusion: bool = setting(
        False, "DISABLE_GROUP_FUSION", boolean,
        "Fuse the members of a grouped collective with nothing else.",
    )  # fmt: skip
    timeline: str = setting(
        "", "TIMELINE", str,
        "Write a Chrome-trace timeline to this file (DYNAMIC: wait for start_timeline).",
        flag="--timeline-filename", yaml="timeline.filename",
    )  # fmt: skip
    timeline_mark_cycles: bool = setting(
        False, "TIMELINE_MARK_CYCLES", boolean,
        "Mark every wake-up of the engine in the timeline.",
        flag="--timeline-mark-cycles", no_flag="--no-timeline-mark-cycles",
        yaml="timeline.mark_cycles",
    )  # fmt: skip
    timeline_all_ranks: bool = setting(
        False, "TIMELINE_ALL_RANKS", boolean,
        "Every rank writes a timeline; '.rank<N>' is put before the file's suffix.",
        flag="--timeline-all-ranks", no_flag="--no-timeline-all-ranks",
        yaml="timeline.all_ranks", alias=False,
    )  # fmt: skip
    autotune: bool = setting(
        False, "AUTOTUNE", boolean,
        "Try other settings while the job runs, and keep the best (see autotune.md).",
        flag="--autotune", no_flag="--no-autotune", yaml="autotune.enabled",
    )  # fmt: skip
    autotune_log: str = setting(
        "", "AUTOTUNE_LOG", str,
        "Write what autotuning tries to this CSV file; the last line is what it keeps.",
        flag="--autotune-log-file", yaml="autotune.log_file",
    )  # fmt: skip
    autotune_warmup_samples: int = setting(
        3, "AUTOTUNE_WARMUP_SAMPLES", number(int, 0, "samples"),
        "Samples that autotuning drops at the start.",
        flag="--autotune-warmup-samples", yaml="autotune.warmup_samples",
    )  # fmt: skip
    autotune_steps_per_sample: int = setting(
        10, "AUTOTUNE_STEPS_PER_SAMPLE", number(int, 1, "steps"),
        "Steps of one measurement; a sample of autotuning is the median of five.",
        flag="--autotune-steps-per-sample", yaml="autotune.steps_per_sample",
    )  # fmt: skip
    autotune_max_samples: int = setting(
        20, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", number(int, 1, "samples"),
        "Samples after which autotuning knows the fusion threshold and the cycle time.",
        flag="--autotune-bayes-opt-max-samples", yaml="autotune.bayes_opt_max_samples",
    )  # fmt: skip
    autotune_noise: float = setting(
        0.8, "AUTOTUNE_GAUSSIAN_PROCESS_NOISE", number(float, 0, "share of the variance", 1),
        "How much of what samples differ by is noise, from 0 to 1.",
        flag="--autotune-gaussian-process-noise", yaml="autotune.gaussian_process_noise",
    )  # fmt: skip
    trace_iterations: str = setting(
        "", "TRACE_ITERATIONS", trace_path,
        "Every rank writes when its iterations did what to this file, .csv or .parquet; "
        "'.rank<N>' is put before the suffix.",
        flag="--trace-iterations", yaml="trace.iterations", alias=False,
    )  # fmt: skip
    stall_check_disable: bool = setting(
        False, "STALL_CHECK_DISABLE", boolean,
        "Do not look for tensors that some ranks never submit.",
        flag="--no-stall-check", no_flag="--stall-check",
        yaml="stall_check.enabled", yaml_inverted=True,
    )  # fmt: skip
    stall_warning_seconds: float = setting(
        60.0, "STALL_CHECK_TIME_SECONDS", number(float, 0, "seconds"),
        "Warn when a tensor has waited this long for some ranks, at most once a second; "
        "0 is never.",
        flag="--stall-check-warning-time-seconds", yaml="stall_check.warning_time_seconds",
    )  # fmt: skip
    stall_shutdown_seconds: float = setting(
        0.0, "STALL_SHUTDOWN_TIME_SECONDS", number(float, 0, "seconds"),
        "End the job, or of an elastic one the late ranks, when a tensor has waited this long for "
        "some ranks; 0 is never.",
        flag="--stall-check-shutdown-time-seconds", yaml="stall_check.shutdown_time_seconds",
    )  # fmt: skip
    start_timeout_seconds: float = setting(
        120.0, "START_TIMEOUT", number(float, 1, "seconds"),
        "How long all ranks may take until every one has started.",
        flag="--start-timeout",
    )  # fmt: skip
    launcher: str = setting(
        "auto", "LAUNCHER", choice(*LAUNCHERS),
        "What starts the ranks: ssh (agents, on this host without ssh), srun or jsrun (agents, by "
        "Slurm or LSF), mpirun, or auto.",
        flag="--launcher", alias=False,
    )  # fmt: skip
    transport: str = setting(
        "auto", "TRANSPORT", choice(*TRANSPORTS),
        "What connects the ranks: tcp, mpi (in a job that MPI has started), or auto: mpi where MPI "
        "has started the ranks and every host has a fabric, tcp otherwise.",
        flag="--transport", alias=False,
    )  # fmt: skip
    network_interfaces: tuple[str, ...] = setting(
        (), "NETWORK_INTERFACES", name_list,
        "Where ranks listen for other hosts: interfaces, addresses or subnets, such as "
        "eth0,10.1.0.0/16; by default all interfaces but the loopback and bridges inside a host.",
        flag="--network-interfaces", alias=False,
    )  # fmt: skip
    tcp_ports: tuple[int, ...] = setting(
        (), "TCP_PORTS", port_range,
        "First and last port on which ranks listen for other hosts, such as 12000-12100; "
        "by default any port.",
        flag="--tcp-ports", alias=False,
    )  # fmt: skip
    tcp_streams: int = setting(
        1, "TCP_STREAMS", number(int, 1, "connections", 16),
        "Connections for large tensors between two ranks of different hosts; that of rank 0 holds. "
        "More than 1 help only where the network limits each connection.",
        flag="--tcp-streams", alias=False,
    )  # fmt: skip
    peer_timeout_seconds: float = setting(
        10.0, "PEER_TIMEOUT", number(float, 2, "seconds"),
        "How long another host may be silent before its ranks count as lost.",
        flag="--peer-timeout", alias=False,
    )  # fmt: skip
    elastic_timeout_seconds: float = setting(
        600.0, "ELASTIC_TIMEOUT", number(float, 0, "seconds"),
        "Elastic training: how long fewer slots than -np (at the start) or --min-np may last.",
        flag="--elastic-timeout",
    )  # fmt: skip
    elastic_admit: str = setting(
        "ready", "ELASTIC_ADMIT", choice(*ADMISSIONS),
        "Elastic training: admit new ranks when they are ready, or let the next commit wait for "
        "them as soon as their host is seen; --as-horovod means wait.",
        alias=False,
    )  # fmt: skip
    elastic_host_timeout_seconds: float = setting(
        1.0, "ELASTIC_HOST_TIMEOUT", number(float, 0.2, "seconds"),
        "Elastic training: how long another host may be silent before its ranks count as lost.",
        alias=False,
    )  # fmt: skip
    elastic_worker_timeout_seconds: float = setting(
        10.0, "ELASTIC_WORKER_TIMEOUT", number(float, 2, "seconds"),
        "Elastic training: how long a rank may be silent before it counts as lost.",
        alias=False,
    )  # fmt: skip
    elastic_check: bool = setting(
        False, "ELASTIC_CHECK", boolean,
        "Elastic training: compare the state of all ranks after each reset, bit by bit.",
        alias=False,
    )  # fmt: skip
    ps_servers: int = setting(
        0, "PS_SERVERS", number(int, 0, "servers"),
        "Parameter server: how many servers hvdlite-run starts beside the workers; 0: none.",
        flag="--ps-servers", yaml="parameter_server.servers", alias=False,
    )  # fmt: skip
    ps_workers: str = setting(
        "mpi", "PS_WORKERS", choice(*PS_WORKERS),
        "Parameter server: workers are the ranks of a job (mpi), or processes that may be lost, "
        "return, come and leave, and have no collectives (independent). Processes that are started "
        "by hand are independent where this is not set.",
        flag="--ps-workers", yaml="parameter_server.workers", alias=False,
    )  # fmt: skip
    ps_snapshot: str = setting(
        "", "PS_SNAPSHOT", str,
        "Parameter server: the folder in which servers save their tables, and from which one that "
        "is started again goes on.",
        flag="--ps-snapshot", yaml="parameter_server.snapshot", alias=False,
    )  # fmt: skip
    ps_snapshot_every: int = setting(
        100, "PS_SNAPSHOT_EVERY", number(int, 1, "updates"),
        "Parameter server: a snapshot is made every so many updates; with 1, a server that is lost "
        "changes nothing.",
        flag="--ps-snapshot-every", yaml="parameter_server.snapshot_every", alias=False,
    )  # fmt: skip
    ps_restarts: int = setting(
        3, "PS_RESTARTS", number(int, 0, "restarts"),
        "Parameter server: how often hvdlite-run starts a server again that was killed, and an "
        "independent worker.",
        flag="--ps-restarts", yaml="parameter_server.restarts", alias=False,
    )  # fmt: skip
    ps_timeout_seconds: float = setting(
        300.0, "PS_TIMEOUT", number(float, 1, "seconds"),
        "Parameter server: how long a server may be silent before it is lost for good.",
        flag="--ps-timeout", yaml="parameter_server.timeout", alias=False,
    )  # fmt: skip
    ps_worker_timeout_seconds: float = setting(
        30.0, "PS_WORKER_TIMEOUT", number(float, 1, "seconds"),
        "Parameter server: how long an independent worker may be silent before the others go on "
        "without it.",
        flag="--ps-worker-timeout", yaml="parameter_server.worker_timeout", alias=False,
    )  # fmt: skip
    mpi_threads_disable: bool = setting(
        False, "MPI_THREADS_DISABLE", boolean,
        "Ask MPI for THREAD_SERIALIZED instead of THREAD_MULTIPLE.",
        flag="--mpi-threads-disable", no_flag="--no-mpi-threads-disable",
        yaml="library_options.mpi_threads_disable",
    )  # fmt: skip
    thread_affinity: tuple[int, ...] = setting(
        (), "THREAD_AFFINITY", core_list,
        "Core of the engine thread, one number for each local rank.",
        flag="--thread-affinity", yaml="library_options.thread_affinity",
    )  # fmt: skip
    devices: str = setting(
        "auto", "DEVICES", str,
        "Which library runs collectives in the memory of accelerators: auto (the vendor's, where "
        "all ranks have it), off (all tensors go through host memory), or the name of one; gloo "
        "lets tensors on the CPU take the way of an accelerator, for tests.",
        flag="--devices", yaml="params.devices", alias=False,
    )  # fmt: skip
    gpus_per_rank: int = setting(
        0, "GPUS_PER_RANK", number(int, 0, "devices"),
        "hvdlite-run lets each rank see so many accelerators of its host, by CUDA_VISIBLE_DEVICES "
        "and its kin: they are 0, 1 ... for the rank; 0: each rank sees all.",
        flag="--gpus-per-rank", alias=False,
    )  # fmt: skip
    device_completion: str = setting(
        "auto", "DEVICE_COMPLETION", choice(*COMPLETIONS),
        "Who waits for collectives on accelerators: stream (the current stream of the device), "
        "host (the thread, which so learns of errors at once), or auto: host in elastic jobs.",
        alias=False,
    )  # fmt: skip
    native: str = setting(
        "auto", "NATIVE", choice(*NATIVE),
        "Compiled collectives inside a host: auto (shipped, or compiled here), on or off.",
        alias=False,
    )  # fmt: skip
    tf_native: str = setting(
        "auto", "TF_NATIVE", choice(*NATIVE),
        "Compiled operations in TensorFlow's graphs: auto (where there is a compiler), on or off.",
        alias=False,
    )  # fmt: skip
    result_memory_bytes: int = setting(
        512 * MIB, "RESULT_MEMORY", number(int, 0, "bytes"),
        "Memory of results of 4 MiB and more that each process keeps for later ones, as long as no "
        "program needs it; 0: none.",
        alias=False,
    )  # fmt: skip
    log_level: str = setting(
        "warning", "LOG_LEVEL", choice(*LOG_LEVELS),
        "trace, debug, info, warning, error or fatal.",
        flag="--log-level", yaml="logging.level",
    )  # fmt: skip
    log_hide_time: bool = setting(
        False, "LOG_HIDE_TIME", boolean,
        "Leave the time out of log lines.",
        flag="--log-without-timestamp", no_flag="--log-with-timestamp",
        yaml="logging.with_timestamp", yaml_inverted=True,
    )  # fmt: skip

    given: frozenset[str] = field(default=frozenset(), compare=False)
    """The settings that the user has made, by name: autotuning leaves them as they are."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> Config:
        """Read the settings from `environ` (``os.environ``); an empty variable counts as unset.

        Raises `ConfigError` that names the variable at fault.
        """
        environ = os.environ if environ is None else environ
        values: dict[str, Any] = {}
        for entry in settings():
            for variable in entry.variables:
                text = environ.get(variable, "")
                if text:
                    values[entry.name] = entry.read(text, variable)
                    break
        values["given"] = frozenset(values)
        if values.get("hierarchical_allreduce") and "allreduce" not in values:
            values["allreduce"] = "hierarchical"
        return cls(**values)


def settings() -> Iterator[Setting]:
    """All settings, in the order of their declaration."""
    for each in fields(Config):
        if "setting" not in each.metadata:
            continue
        env, parse, help, where = each.metadata["setting"]
        yield Setting(each.name, each.default, env, parse, help, **where)
