"""Every setting of hvdlite, declared once.

A field of `Config` gives the environment variable, its ``HOROVOD_`` alias, the launcher's flag,
the key in the YAML file, the help text and the row of the table in the docs. The settings of its
bases come first; each base has those of one subject.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.segmentation.strategies import JOB_THRESHOLD_BYTES
from hvdlite.common.settings.setting import (
    MIB,
    PREFIX,
    Setting,
    boolean,
    choice,
    core_list,
    name_list,
    number,
    port_range,
    segmentation,
    setting,
    trace_path,
)

# The settings of collectives, and of what watches them: fusion, timeline, tuning, stalls.
DATA_PLANES = ("auto", "shm", "ring", "mpi")
ALLREDUCES = (
    "auto", "shm", "ring", "hierarchical", "trees", "halving", "doubling", "mpi",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CollectiveSettings:
    """How tensors are reduced, and what is recorded of it. Units end the names."""

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
        "Longest time in which more tensors may gather while nobody waits for one; 0: none. Five "
        "times as long while more come, where the ranks of the only host take all cores.",
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
        "halving or doubling (these between hosts), or mpi.",
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
        "Horovod's spelling of HVDLITE_ALLREDUCE=hierarchical and "
        "HVDLITE_DEVICE_ALLREDUCE=hierarchical.",
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
        "Accepted, as Horovod has it, and without effect: nothing is assumed of the noise.",
        flag="--autotune-gaussian-process-noise", yaml="autotune.gaussian_process_noise",
    )  # fmt: skip
    trace_iterations: str = setting(
        "", "TRACE_ITERATIONS", trace_path,
        "Every rank writes when its iterations did what to this file, .csv or .parquet; "
        "'.rank<N>' is put before the suffix.",
        flag="--trace-iterations", yaml="trace.iterations", alias=False,
    )  # fmt: skip
    live: bool = setting(
        False, "LIVE", boolean,
        "Count what each rank does while it runs, for hvd.metrics(); hvdlite-run "
        "--live, --live-page, --live-report and --metrics-port set it.",
        yaml="live.enabled", alias=False,
    )  # fmt: skip
    check_weights: int = setting(
        0, "CHECK_WEIGHTS", number(int, 0, "steps"),
        "Compare the weights and the optimizer state of all ranks bit by bit, after the first step "
        "and then every so many; a difference is an error (see troubleshooting.md). 0 is never.",
        flag="--check-weights", yaml="weights_check.steps", alias=False,
    )  # fmt: skip
    stall_check_disable: bool = setting(
        False, "STALL_CHECK_DISABLE", boolean,
        "Do not look for tensors that some ranks never submit.",
        flag="--no-stall-check", no_flag="--stall-check",
        yaml="stall_check.enabled", yaml_inverted=True,
    )  # fmt: skip
    stall_warning_seconds: float = setting(
        60.0, "STALL_CHECK_TIME_SECONDS", number(float, 0, "seconds"),
        "Warn when a tensor has waited this long for some ranks, at most once a second, and ever "
        "more rarely of the same; 0 is never.",
        flag="--stall-check-warning-time-seconds", yaml="stall_check.warning_time_seconds",
    )  # fmt: skip
    stall_shutdown_seconds: float = setting(
        0.0, "STALL_SHUTDOWN_TIME_SECONDS", number(float, 0, "seconds"),
        "End the job, or of an elastic one the late ranks, when a tensor has waited this long for "
        "some ranks; 0 is never.",
        flag="--stall-check-shutdown-time-seconds", yaml="stall_check.shutdown_time_seconds",
    )  # fmt: skip


# Settings of earlier versions, without the prefix, and what holds instead.
REMOVED = {
    "ELASTIC_ADMIT": "new ranks are admitted when they are ready; with --as-horovod a commit waits "
    "for them",
}
# The settings of jobs: how ranks start and meet, elastic training, and parameter servers.
LAUNCHERS = ("auto", "ssh", "srun", "jsrun", "mpirun")
TRANSPORTS = ("auto", "tcp", "mpi")
PS_WORKERS = ("mpi", "independent")


@dataclass(frozen=True, kw_only=True)
class JobSettings(CollectiveSettings):
    """Where ranks meet, and how long they wait for each other. Units end the names."""

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
        "return, come and leave, and have no collectives (independent; the default by hand).",
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


NATIVE = ("auto", "on", "off")
COMPLETIONS = ("auto", "stream", "host")
DEVICE_ALLREDUCES = ("flat", "hierarchical")
LOG_LEVELS = ("trace", "debug", "info", "warning", "error", "fatal")


@dataclass(frozen=True, kw_only=True)
class Config(JobSettings):
    """The settings of one rank. Units end the names."""

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
        "all ranks have it), off (all tensors go through host memory), or the name of one (see "
        "devices.md).",
        flag="--devices", yaml="params.devices", alias=False,
    )  # fmt: skip
    device_allreduce: str = setting(
        "flat", "DEVICE_ALLREDUCE", choice(*DEVICE_ALLREDUCES),
        "How accelerators of several hosts are reduced: flat (by the vendor's library alone), or "
        "hierarchical (by the library inside hosts, and by hvdlite's connections between them).",
        flag="--device-allreduce", yaml="params.device_allreduce", alias=False,
    )  # fmt: skip
    nccl_library: str = setting(
        "", "NCCL_LIBRARY", str,
        "The file of NCCL for HVDLITE_DEVICES=nccl; by default that of NVIDIA's wheel, of torch, "
        "of TensorFlow, or the one that the loader finds.",
        alias=False,
    )  # fmt: skip
    cudart_library: str = setting(
        "", "CUDART_LIBRARY", str,
        "The file of the CUDA runtime for HVDLITE_DEVICES=nccl without PyTorch; found as NCCL is.",
        alias=False,
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
        for name, instead in REMOVED.items():
            if environ.get(PREFIX + name):
                raise ConfigError(f"{PREFIX}{name} is a setting no more: {instead}")
        values: dict[str, Any] = {}
        for entry in settings():
            for variable in entry.variables:
                text = environ.get(variable, "")
                if text:
                    values[entry.name] = entry.read(text, variable)
                    break
        values["given"] = frozenset(values)
        if values.get("hierarchical_allreduce"):
            values.setdefault("allreduce", "hierarchical")
            values.setdefault("device_allreduce", "hierarchical")
        return cls(**values)


def settings() -> Iterator[Setting]:
    """All settings, in the order of their declaration."""
    for each in fields(Config):
        if "setting" not in each.metadata:
            continue
        env, parse, help, where = each.metadata["setting"]
        yield Setting(each.name, each.default, env, parse, help, **where)


# Names that begin as those of hvdlite's environment variables and are none: typing errors.


# What launchers and users say of a job, without the prefix. A test looks for others in the code.
OF_A_JOB = (
    "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME", "HOST_NAME",
    "RENDEZVOUS", "RENDEZVOUS_SERVER", "SECRET", "INCARNATION", "ELASTIC", "ELASTIC_DRIVER",
    "WORKER", "RANK_PROCESS", "SPARK_DEVICES",
    "ROLE", "SCHEDULER", "NUM_SERVERS", "NUM_WORKERS", "NODE_ID", "NODE_NUMBER", "PS_TOKEN",
    "PS_TLS", "PS_CURVE", "PS_JOIN",
)  # fmt: skip
# Beginnings of names that the launcher and tests give, without the prefix.
RESERVED = ("LAUNCHER_", "TEST_")


def misspelt(environ: Iterable[str]) -> list[str]:
    """Return a sentence about each variable of hvdlite in `environ` that does not exist."""
    known = [entry.variable for entry in settings()] + [PREFIX + name for name in OF_A_JOB]
    reserved = tuple(PREFIX + name for name in RESERVED)
    return [
        f"the environment variable {name} is unknown, and ignored"
        + (closest(name, known) or "; docs/settings.md lists those that there are")
        for name in sorted(environ)
        if name.startswith(PREFIX) and name not in known and not name.startswith(reserved)
    ]


def closest(name: str, known: Collection[str]) -> str:
    """Return a question about which of the `known` names was meant; "" where none is like it."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    return f": did you mean {found[0]}?" if found else ""
