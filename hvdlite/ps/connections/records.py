"""What one process of a cluster records of its pushes and pulls: a timeline, and a table of rows.

How stale something was: of a push, the number of updates that the server has made between the
values with which its gradients were computed and the push; of a pull, how many finished steps the
slowest worker is behind the one that pulls.
"""

from __future__ import annotations

import csv
import threading
import time
from collections.abc import Mapping
from pathlib import PurePath
from typing import NamedTuple, TextIO

from hvdlite.common.timeline.recorder import Timeline, insert_in_name

TIMELINE, TRACE = "HVDLITE_TIMELINE", "HVDLITE_TRACE_ITERATIONS"
DYNAMIC = "dynamic"


class Row(NamedTuple):
    """One push, pull or update; times are seconds since the epoch."""

    kind: str
    table: str
    peer: str  # "server 0" in a worker, "worker 1" in a server; empty for an update.
    clock: int | None  # Finished steps of the worker.
    version: int  # Updates of the server, when it answered.
    stale: int | None
    start: float
    end: float
    bytes: int


class Records:
    """Where pushes, pulls and updates are written; both of its parts may be None.

    Its methods are called by one thread, but `close`.
    """

    def __init__(
        self, timeline: Timeline | None = None, rows: TextIO | None = None, *,
        owns_timeline: bool = False,
    ) -> None:  # fmt: skip
        self._timeline, self._owns_timeline = timeline, owns_timeline
        self._file = rows
        self._lock = threading.Lock()  # Guards the file.
        self._since: dict[tuple[str, str, str], float] = {}
        # By kind: how many have ended, their bytes and seconds. None before the first `counts`.
        self._counts: dict[str, tuple[int, int, float]] | None = None
        self._stale = 0  # Of the last push.
        # Of the wall clock, which must not jump in between.
        self._shift = time.time() - time.monotonic()
        if rows is not None:
            csv.writer(rows).writerow(Row._fields)

    @property
    def enabled(self) -> bool:
        if self._counts is not None or self._file is not None:
            return True
        return self._timeline is not None and self._timeline.enabled

    def counts(self) -> dict[str, float]:
        """Return numbers for the live view, which are counted from the first call on."""
        if self._counts is None:
            self._counts = {}
        found = {"server_requests": float(len(self._since)), "staleness": float(self._stale)}
        for kind, (calls, nbytes, seconds) in list(self._counts.items()):
            found[f"collective_calls_total.{kind}"] = calls
            found[f"collective_tensors_total.{kind}"] = calls
            found[f"collective_bytes_total.{kind}"] = nbytes
            found[f"collective_seconds_total.{kind}"] = seconds
        return found

    def begin(self, kind: str, table: str, peer: str = "") -> None:
        """Note that a push, pull or update begins; one that is sent again has begun before."""
        if self.enabled and (kind, table, peer) not in self._since:
            self._since[kind, table, peer] = time.monotonic()
            if self._timeline is not None:
                self._timeline.span_start(_track(kind, table, peer), kind.upper())

    def end(
        self, kind: str, table: str, peer: str = "", *, version: int, clock: int | None = None,
        stale: int | None = None, nbytes: int = 0,
    ) -> None:  # fmt: skip
        start = self._since.pop((kind, table, peer), None)
        if start is None:
            return
        if self._timeline is not None:
            about = {"clock": clock, "version": version, "stale": stale, "bytes": nbytes}
            given = {word: value for word, value in about.items() if value is not None}
            self._timeline.span_end(_track(kind, table, peer), given)
        times = start + self._shift, time.monotonic() + self._shift
        if self._counts is not None:
            calls, sent, seconds = self._counts.get(kind, (0, 0, 0.0))
            self._counts[kind] = calls + 1, sent + nbytes, seconds + times[1] - times[0]
            self._stale = stale or 0 if kind == "push" else self._stale
        with self._lock:
            if self._file is not None:
                row = Row(kind, table, peer, clock, version, stale, *times, nbytes)
                csv.writer(self._file).writerow(row)

    def close(self) -> None:
        if self._owns_timeline and self._timeline is not None:
            self._timeline.close()
        with self._lock:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    @classmethod
    def by_settings(
        cls, environ: Mapping[str, str], role: str, number: int, timeline: Timeline | None = None
    ) -> Records:
        """Return what the settings ask for; `timeline` is that of a rank, which is used then.

        Raises OSError where a file cannot be written.
        """
        path, trace = environ.get(TIMELINE, ""), environ.get(TRACE, "")
        owns = timeline is None and bool(path) and path.lower() != DYNAMIC
        if owns:
            path = path_of_process(path, role, number)
            timeline = Timeline.open(path, number, who=f"{role} {number}")
        rows = None
        if trace:
            name = str(PurePath(path_of_process(trace, role, number)).with_suffix(".csv"))
            try:
                rows = open(name, "w", newline="", encoding="utf-8", buffering=1)  # noqa: SIM115
            except OSError as error:
                why = f"{role} {number} cannot write {TRACE}: {error.strerror}"
                raise OSError(error.errno, why, name) from None
        return cls(timeline, rows, owns_timeline=owns)


OFF = Records()


def path_of_process(path: str, role: str, number: int) -> str:
    """Return the file of a process: ``a.json`` -> ``a.server0.json``."""
    return insert_in_name(path, f".{role}{number}")


def _track(kind: str, table: str, peer: str) -> str:
    return f"[{kind}] {table}, {peer}" if peer else f"[{kind}] {table}"
