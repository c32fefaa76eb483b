"""Every setting of hvdlite, declared once.

A field of `Config` gives the environment variable, its ``HOROVOD_`` alias, the launcher's flag,
the key in the YAML file, the help text and the row of the table in the docs. The settings of its
bases come first; each base has those of one subject.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hvdlite.common.plain.job_settings import JobSettings
from hvdlite.common.plain.setting import MIB, Setting, boolean, choice, core_list, number, setting

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
        "all ranks have it), off (all tensors go through host memory), or the name of one; nccl is "
        "hvdlite's own binding to the NCCL that is installed; gloo "
        "lets tensors on the CPU take the way of an accelerator, for tests.",
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
