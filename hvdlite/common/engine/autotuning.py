"""Autotuning in rank 0's engine: what has run goes in, orders for all ranks come out, and a log."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Iterable

from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives.table import ROWS
from hvdlite.common.decisions.autotuner import Autotuner, Trial
from hvdlite.common.plain.config import MIB, Config
from hvdlite.common.plain.entries import SegmentRun
from hvdlite.common.plain.messages import Retune

log = logging.getLogger("hvdlite")

# Horovod's columns, and what hvdlite has beyond them.
HEADER = (
    "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce", "cache_enabled",
    "cycle_time_ms", "tensor_fusion_threshold", "score", "piece_bytes",
)  # fmt: skip


class Tuning:
    """Belongs to the engine thread of rank 0."""

    end: Callable[[], None]  # called when nothing is left to try

    def __init__(
        self, config: Config, topology: Topology, retune: Callable[[Retune], None]
    ) -> None:
        """`retune` gives an order to all ranks, which is answered by `in_force`."""
        self._size = topology.size
        self._retune = retune
        self._tuner = Autotuner(config, topology)
        self._log = AutotuneLog(config.autotune_log)

    def observe(self, run: SegmentRun) -> None:
        """A segment has run; perhaps all ranks shall go on with other settings."""
        if not ROWS[run.collective].carries_gradients or len(run.members) < self._size:
            return
        values = self._tuner.observe(run.names, run.bytes, run.end)
        self._log.write(self._tuner.take_trials())
        if values is not None:
            self._retune(values)
        if self._tuner.finished:
            self.end()
            log.info("autotuning has ended, and keeps %s", self._tuner.text)

    def in_force(self) -> None:
        """Rank 0 has obeyed the order."""
        self._tuner.in_force()


class AutotuneLog:
    """A CSV file in Horovod's form, complete after every line.

    One that cannot be written is warned of.
    """

    def __init__(self, path: str) -> None:
        """No path: nothing is written."""
        self._path = path
        self._append("w", [HEADER])

    def write(self, trials: Iterable[Trial]) -> None:
        """Add a line for each."""
        lines = [_line(trial) for trial in trials]
        if lines:
            self._append("a", lines)

    def _append(self, mode: str, lines: Iterable[Iterable[object]]) -> None:
        if not self._path:
            return
        try:
            with open(self._path, mode, encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(lines)
        except OSError as error:
            log.warning("autotuning goes on without its log: %s", error)
            self._path = ""


def _line(trial: Trial) -> tuple[object, ...]:
    values = trial.values
    return (
        int(trial.hierarchical),
        0,
        0,
        int(values.cache_capacity > 0),
        f"{values.cycle_time_ms:g}",
        f"{values.fusion_threshold_bytes / MIB:g}",
        f"{trial.score:.6g}",
        values.piece_bytes,
    )
