"""Autotuning in the engine of rank 0: observes segments, orders new settings, writes the log."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable

from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.table import SPECS
from hvdlite.common.decisions.autotuner import Autotuner, Sample
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.requests.messages import Retune
from hvdlite.common.settings.config import Config
from hvdlite.common.settings.setting import MIB

log = logging.getLogger("hvdlite")

# The columns of Horovod's log, then those that only hvdlite has.
HEADER = (
    "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled",
    "cycle_time_ms", "tensor_fusion_threshold", "score", "piece_bytes",
)  # fmt: skip


class Autotuning:
    """Feed the autotuner and pass on its decisions. Owned by the engine thread of rank 0."""

    # Ends the observation, called when the search is complete. The engine sets it when it has
    # registered `observe`, since only then the function exists.
    stop_observing: Callable[[], None]

    def __init__(
        self, config: Config, topology: Topology, retune: Callable[[Retune], None]
    ) -> None:
        """Decide by `config`; `retune` orders all ranks, and `settings_applied` confirms it."""
        self._size = topology.size
        self._retune = retune
        self._tuner = Autotuner(config, topology)
        self.settings_applied = self._tuner.settings_applied  # rank 0 has executed the last order
        self._log = AutotuneLog(config.autotune_log)

    def observe(self, run: SegmentRun) -> None:
        """Record a segment that has run; order new settings if it was the last of a sample."""
        if not SPECS[run.collective].carries_gradients or len(run.members) < self._size:
            return
        values = self._tuner.observe(run.names, run.bytes, run.end)
        self._log.write(self._tuner.pop_samples())
        if values is not None:
            self._retune(values)
        if self._tuner.finished:
            self.stop_observing()
            log.info("autotuning has ended, and keeps %s", self._tuner.text)


class AutotuneLog:
    """A CSV file in Horovod's form, complete after every line.

    A file that cannot be written is reported once, and autotuning goes on without it.
    """

    def __init__(self, path: str) -> None:
        """Start the file with its header; without a path nothing is written."""
        self._path = path
        self._append("w", [HEADER])

    def write(self, samples: Iterable[Sample]) -> None:
        lines = [_line(sample) for sample in samples]
        if lines:
            self._append("a", lines)

    def _append(self, mode: str, lines: Iterable[Iterable[object]]) -> None:
        if not self._path:
            return
        try:
            with open(self._path, mode, encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(lines)
        except OSError as error:
            log.warning("autotuning goes on without HVDLITE_AUTOTUNE_LOG: %s", error)
            self._path = ""


def _line(sample: Sample) -> tuple[object, ...]:
    values = sample.values
    return (
        int(sample.hierarchical),
        0,
        0,
        int(values.cache_capacity > 0),
        f"{values.cycle_time_ms:g}",
        f"{values.fusion_threshold_bytes / MIB:g}",
        f"{sample.score:.6g}",
        values.piece_bytes,
    )
