"""The numbers that a rank counts while it runs: their public names, and how they are sent.

One table for `hvd.metrics()`, Prometheus and the launcher's view of the job. Names follow the
conventions of Prometheus, without the prefix ``hvdlite_``: what only grows ends with ``_total``,
times are seconds, and sizes bytes.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

PREFIX = "hvdlite_"  # Of the names in Prometheus.
BY_COLLECTIVE = "collective"  # The one label that numbers of a rank have.


class Metric(NamedTuple):
    """A number of one rank, or of each collective on one rank."""

    name: str
    help: str
    label: str = ""

    @property
    def counts(self) -> bool:
        """Whether it only grows."""
        return self.name.endswith("_total")


METRICS = {
    metric.name: metric
    for metric in (
        Metric("steps_total", "Steps of the distributed optimizer."),
        Metric("step_seconds_total", "Time in steps, with what lies between them."),
        Metric("compute_seconds_total", "Forward, backward and the optimizer's own step."),
        Metric("data_seconds_total", "Between the end of a step and forward of the next one."),
        Metric("exchange_hidden_seconds_total", "Exchange of gradients during backward."),
        Metric("exchange_waited_seconds_total", "From the end of backward to reduced gradients."),
        Metric(
            "peers_waited_seconds_total",
            "Tensors of this rank were ready, and those of other ranks were not.",
        ),
        Metric("samples_total", "Rows of the batches, where the model takes a tensor (PyTorch)."),
        Metric("gc_seconds_total", "Garbage collection of Python."),
        Metric("cpu_seconds_total", "The main thread was on a core."),
        Metric("core_waited_seconds_total", "The main thread could have run, and had no core."),
        Metric("major_faults_total", "Pages that were read from disk."),
        Metric("retransmits_total", "TCP segments that this host has sent again."),
        Metric(
            "collective_calls_total",
            "Collectives that were run; fused ones are one. Pushes and pulls count here, too.",
            BY_COLLECTIVE,
        ),
        Metric("collective_tensors_total", "Tensors in them.", BY_COLLECTIVE),
        Metric("collective_bytes_total", "Bytes of this rank's tensors in them.", BY_COLLECTIVE),
        Metric("collective_seconds_total", "How long they ran.", BY_COLLECTIVE),
        Metric("requests_total", "Tensors that were reported to the coordinator."),
        Metric("cached_requests_total", "Of these, in one bit, as the response cache had them."),
        Metric("server_requests", "Pushes and pulls that no parameter server has answered yet."),
        Metric("staleness", "Updates that servers had made since the values of the last push."),
        Metric("memory_bytes", "Resident memory of the process."),
        Metric("swap_bytes", "Memory of the process that is swapped out."),
        Metric("core_speed", "Python's loops in a microsecond, as measured now and then."),
        Metric("runnable_processes", "Processes of the host that could run."),
        Metric("cores", "Cores of the host."),
        Metric("progress_steps", "Steps that were made, by hvd.progress()."),
        Metric("progress_total_steps", "Steps of the whole training, by hvd.progress()."),
        Metric("world", "The world of an elastic job."),
        Metric("commit", "The last commit in an elastic job."),
    )
}

# What the launcher knows of the job, for Prometheus alone.
JOB_METRICS = (
    Metric("ranks", "Ranks that were heard of."),
    Metric("events_total", "Worlds, stalls, failures and stragglers.", "kind"),
    Metric("age_seconds", "Since a rank was heard of."),
    Metric("straggler_seconds", "A rank makes the others wait so long in a step.", "cause"),
)

VERSION = 1
MOST_CHARACTERS = 3800  # A line of at most 4096 bytes is written to a pipe as a whole.
MOST_VALUES = 200
LEAST_VALUE = 1e-9  # Other than 0.
LONGEST_NAME = 120  # Of a tensor.
LABEL = re.compile(r"[a-z_]{1,40}")


class Sample(NamedTuple):
    """What one rank has counted until now."""

    rank: int
    size: int
    values: dict[str, float]  # By name; of a collective ``name.collective``.
    tensor: str = ""  # For which it waited longest since the sample before.


def pack(sample: Sample) -> str:
    """Return one line; the collectives that are called least are left out where it is too long."""
    values = {
        key: value if isinstance(value, int) else round(value, 6)
        for key, value in sample.values.items()
    }
    while True:
        fields = [VERSION, sample.rank, sample.size, sample.tensor[:LONGEST_NAME], values]
        line = json.dumps(fields, separators=(",", ":"))
        labels = {key.partition(".")[2] for key in values} - {""}
        if len(line) <= MOST_CHARACTERS or not labels:
            return line
        least = min(labels, key=lambda label: values.get(f"collective_calls_total.{label}", 0))
        values = {key: value for key, value in values.items() if key.partition(".")[2] != least}


def unpack(line: str) -> Sample | None:
    """Return the sample of a line; None where it is none, whatever the line is."""
    try:
        version, rank, size, tensor, values = json.loads(line)
    except (ValueError, TypeError, RecursionError):
        return None
    sizes = type(rank) is int and type(size) is int and 0 <= rank < size < 1 << 24
    if version != VERSION or not sizes or not isinstance(tensor, str):
        return None
    if not isinstance(values, dict) or len(values) > MOST_VALUES:
        return None
    if not all(_is_value(key, value) for key, value in values.items()):
        return None
    tensor = tensor.encode(errors="replace").decode()  # Half a character cannot be sent on.
    return Sample(rank, size, {key: float(value) for key, value in values.items()}, tensor)


def _is_value(key: str, value: object) -> bool:
    name, _, label = key.partition(".")
    metric = METRICS.get(name)
    if metric is None or bool(metric.label) != bool(LABEL.fullmatch(label)):
        return False
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    # NaN is not; `math.isfinite` fails with huge integers, and ratios of these are finite.
    return value == 0 or LEAST_VALUE <= value < 1e18
