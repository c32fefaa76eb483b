"""The settings of collectives, and of what watches them: fusion, timeline, tuning, stalls."""

from __future__ import annotations

from dataclasses import dataclass

from hvdlite.common.plain.setting import (
    MIB,
    boolean,
    choice,
    number,
    segmentation,
    setting,
    trace_path,
)
from hvdlite.common.segmentation.strategies import JOB_THRESHOLD_BYTES

DATA_PLANES = ("auto", "shm", "ring", "mpi")
ALLREDUCES = (
    "auto", "shm", "ring", "hierarchical", "trees", "halving", "two_level", "doubling", "mpi",
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
