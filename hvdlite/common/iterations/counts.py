"""What a rank counts: steps, times, collectives, and what its process and host are doing.

    training thread      a finished step -> queue
    engine thread        a collective that has run -> the same queue
    thread "hvdlite-live"  once a second: queue -> sums, all of it, as one line for the launcher

The times of steps are those of the iteration trace, by fewer hooks.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import os
import resource
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from hvdlite.common.base.metrics import Sample, pack
from hvdlite.common.base.report_failure import STANDARD_ERROR, launcher_pipe, tell_launcher
from hvdlite.common.iterations.following import Following
from hvdlite.common.iterations.rows import IterationTimes
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import this_process
from hvdlite.common.runtime.runtime import Runtime

PERIOD_SECONDS = 1.0
MOST_RUNS = 2048  # That are remembered.
MOST_SHOWN, MOST_NAMES = 10, 20  # Of the runs of one tensor, and of other names.
PROBE_LOOPS = 2000  # Some 40 us of Python.
PROBES_KEPT = 5  # The fastest one counts: the others were disturbed.
OF_STEPS = (
    "steps_total", "step_seconds_total", "compute_seconds_total", "data_seconds_total",
    "exchange_hidden_seconds_total", "exchange_waited_seconds_total", "peers_waited_seconds_total",
    "samples_total",
)  # fmt: skip
OF_REQUESTS = "requests_total", "cached_requests_total"
OF_COLLECTIVES = (
    "collective_calls_total", "collective_tensors_total", "collective_bytes_total",
    "collective_seconds_total",
)  # fmt: skip


class Counts(Following):
    """The counts of one rank, from world to world of an elastic job."""

    _coarse = True

    def __init__(self, runtime: Runtime, *, between_steps: bool = False) -> None:
        """Begin to count; steps of a trainer that has begun one after it if `between_steps`."""
        super().__init__(runtime)  # The lock of `settle` guards the sums.
        self._sums: dict[str, float] = dict.fromkeys((*OF_STEPS, *OF_REQUESTS), 0)
        self._reported = runtime.engine.reported
        self._by_collective: dict[str, list[float]] = {}
        self._last_end: float | None = None
        self._waited_until = 0.0  # Of collectives that belong to no step.
        self._longest = (0.0, "")  # The longest wait since the last line, and for which tensor.
        self._began = time.monotonic()
        self._process = ProcessFacts()
        self._stopping = threading.Event()
        self._runs: deque[SegmentRun] = deque(maxlen=MOST_RUNS)
        self._tells = False
        self._begin(between_steps=between_steps)

    def tell_launcher(self) -> None:
        """Tell the launcher from now on, where there is one; idempotent."""
        with self._settling:
            begins, self._tells = not self._tells and launcher_pipe() is not None, True
        if begins:
            threading.Thread(target=self._tell, name="hvdlite-live", daemon=True).start()

    @property
    def runtime(self) -> Runtime:
        """The rank, in the world in which it is now."""
        return self._runtime

    @property
    def steps(self) -> int:
        """How many steps have ended."""
        self.settle()
        return int(self._sums["steps_total"])

    def stop(self) -> None:
        """Count nothing any more; idempotent."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._end()
            self._process.close()

    def enter(self, runtime: Runtime) -> None:
        """Go on in another world; the time between them belongs to no step."""
        with self._settling:
            self.settle()
            self._count_requests()
            super().enter(runtime)
            self._reported = runtime.engine.reported
            self._last_end = None

    # -- what occurs

    def _put_run(self, run: SegmentRun, of_iteration: bool) -> None:
        sums = self._by_collective.get(run.collective)
        if sums is None:
            sums = self._by_collective[run.collective] = [0, 0, 0, 0.0]
        sums[0] += 1
        sums[1] += len(run.names)
        sums[2] += run.bytes
        sums[3] += run.end - run.start
        self._runs.append(run)
        if not of_iteration:
            waited = self._wait_of(run, self._waited_until)
            self._waited_until = max(self._waited_until, run.start)
            self._sums["peers_waited_seconds_total"] += waited

    def _wait_of(self, run: SegmentRun, since: float) -> float:
        """Return how long a tensor that was ready has waited for other ranks from `since` on."""
        waited = run.start - max(run.ready or run.start, since)
        if waited > self._longest[0]:
            self._longest = (waited, run.names[-1])
        return max(waited, 0.0)

    def _put(self, times: IterationTimes, runs: list[SegmentRun]) -> None:
        start, _, bp_end, optimizer, end, samples = times
        assert start is not None
        ready = end if bp_end is None else bp_end
        hidden = waited = 0.0
        since = start if bp_end is None else bp_end  # A wait during backward costs nothing.
        for run in runs:
            hidden += max(min(run.end, ready) - run.start, 0.0)
            waited += self._wait_of(run, since)
            since = max(since, run.start)
        data = 0.0 if self._last_end is None else start - self._last_end
        self._last_end = end
        own = optimizer or 0.0
        sums = self._sums
        sums["steps_total"] += 1
        sums["step_seconds_total"] += data + end - start
        sums["compute_seconds_total"] += ready - start + (0.0 if bp_end is None else own)
        sums["data_seconds_total"] += data
        sums["exchange_hidden_seconds_total"] += hidden
        sums["exchange_waited_seconds_total"] += max(end - ready - own, 0.0)
        sums["peers_waited_seconds_total"] += waited
        sums["samples_total"] += samples

    # -- who asks

    def values(self) -> dict[str, float]:
        """Return all counts by their public names."""
        with self._settling:
            self.settle()
            self._count_requests()
            found = dict(self._sums)
            for collective, sums in self._by_collective.items():
                found |= {
                    f"{name}.{collective}": value
                    for name, value in zip(OF_COLLECTIVES, sums, strict=True)
                }
        progress = self._runtime.trainers.progress
        if progress is not None:
            total, base = progress
            found |= {"progress_total_steps": total, "progress_steps": base + self.steps}
        worker = this_process.worker
        if worker is not None:
            found |= {"world": worker.epoch, "commit": worker.commit}
        return found | this_process.server_counts() | self._process.values()

    def _count_requests(self) -> None:
        before, self._reported = self._reported, self._runtime.engine.reported
        for name, now, then in zip(OF_REQUESTS, self._reported, before, strict=True):
            self._sums[name] += now - then

    def wait_for_steps(self, steps: int, seconds: float) -> int:
        """Return when so many more steps have ended, or after so long without one; how many did."""
        stepped = threading.Event()
        self._on_end = stepped.set
        try:
            first = self.steps
            while self.steps - first < steps:
                stepped.clear()
                if self.steps - first < steps and not stepped.wait(seconds):
                    break
            return self.steps - first
        finally:
            self._on_end = None

    def history(self, wanted: str) -> dict[str, Any]:
        """Return what was run of a tensor of late, on the clock of rank 0.

        ``{name, runs: [[ready, start, end, bytes, tensors]], waits, others}``: when this rank was
        ready, when the exchange began and ended, and what was exchanged together; since how many
        seconds it is outstanding, or None. The name may lack its collective. Without a tensor of
        the name, `others` are names that contain it, or all, those that are outstanding first.
        """
        waiting = {name: seconds for seconds, name in self._outstanding()}
        with self._settling:
            self.settle()
            runs = list(self._runs)
        shift = self._runtime.engine.clock_offset_seconds
        groups = dict.fromkeys(run.names for run in reversed(runs))  # The same in each step.
        names = dict.fromkeys([*waiting, *(name for group in groups for name in group)])
        name = next((each for each in names if wanted in (each, each.partition(".")[2])), None)
        if name is None:
            others = [each for each in names if wanted in each] or list(names)
            return {"name": "", "runs": [], "waits": None, "others": others[:MOST_NAMES]}
        having = {group for group in groups if name in group}
        found = [run for run in runs if run.names in having][-MOST_SHOWN:]
        return {"name": name, "others": [], "waits": waiting.get(name), "runs": [
            [(run.ready or run.start) + shift, run.start + shift, run.end + shift, run.bytes,
             len(run.names)] for run in found
        ]}  # fmt: skip

    def _outstanding(self) -> list[tuple[float, str]]:
        """Return since how many seconds tensors are outstanding, the oldest one first."""
        now = time.monotonic()
        found = self._runtime.engine.outstanding()
        return [(now - max(at, self._began), name) for name, at in found]

    def _tell(self) -> None:
        """Send a line a second; where lines are a host's standard error, one of all its ranks."""
        while not self._stopping.wait(self._period()):
            runtime = self._runtime
            values = self.values()
            with self._settling:
                longest, self._longest = self._longest, (0.0, "")
            _, tensor = max([longest, *self._outstanding()[:1]])
            sample = Sample(runtime.rank, runtime.topology.size, values, tensor)
            tell_launcher("live", pack(sample))

    def _period(self) -> float:
        runtime = self._runtime
        by_output = launcher_pipe() == STANDARD_ERROR
        return PERIOD_SECONDS * (len(runtime.topology.peers(runtime.rank)) if by_output else 1)


class _Collections(map):  # type: ignore[type-arg]
    """Takes its next element whenever a collection of garbage starts or stops.

    Nothing of it is Python code, in which a signal could raise `KeyboardInterrupt`: where a
    callback of `gc` raises, a user's Ctrl-C would be printed as ignored, and would be lost.
    """

    start = stop = property(fset=next)


class ProcessFacts:
    """What the kernel and Python know of this process. What cannot be read is left out."""

    def __init__(self) -> None:
        self._probes: list[float] = []
        # The seconds of all collections; while one runs, they lack the time at which it will end.
        self._gc_seconds = deque([0.0], maxlen=1)
        times = map(operator.mul, iter(time.monotonic, None), itertools.cycle((-1, 1)))
        watch = _Collections(self._gc_seconds.append, itertools.accumulate(times))
        self._on_collection = functools.partial(setattr, watch)
        gc.callbacks.append(self._on_collection)

    def close(self) -> None:
        """Stop to watch the garbage collection."""
        with suppress(ValueError):
            gc.callbacks.remove(self._on_collection)

    def values(self) -> dict[str, float]:
        """Return what is known now."""
        gc_seconds = self._gc_seconds[0]
        found: dict[str, float] = {
            "gc_seconds_total": gc_seconds + (time.monotonic() if gc_seconds < 0 else 0.0),
            "major_faults_total": resource.getrusage(resource.RUSAGE_SELF).ru_majflt,
            "core_speed": self._core_speed(),
            "cores": os.cpu_count() or 1,
        }
        for source in (_memory, _swap, _schedule, _runnable, _retransmits):
            with suppress(OSError, ValueError, IndexError):
                found |= source()
        return found

    def _core_speed(self) -> float:
        """Return how fast a core works at present, whoever else may want it."""
        began = time.thread_time()
        for _ in range(PROBE_LOOPS):
            pass
        seconds = time.thread_time() - began
        self._probes = [*self._probes[1 - PROBES_KEPT :], seconds]
        return PROBE_LOOPS / max(min(self._probes) * 1e6, 1e-3)


def _words(path: str) -> list[str]:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read().split()


def _memory() -> dict[str, float]:
    return {"memory_bytes": int(_words("/proc/self/statm")[1]) * resource.getpagesize()}


def _swap() -> dict[str, float]:
    words = _words("/proc/self/status")
    return {"swap_bytes": int(words[words.index("VmSwap:") + 1]) * 1024}


def _schedule() -> dict[str, float]:
    ran, waited = map(int, _words("/proc/self/schedstat")[:2])  # Of the main thread.
    return {"cpu_seconds_total": ran * 1e-9, "core_waited_seconds_total": waited * 1e-9}


def _runnable() -> dict[str, float]:
    return {"runnable_processes": int(_words("/proc/loadavg")[3].partition("/")[0])}


def _retransmits() -> dict[str, float]:
    def rows() -> Iterator[list[str]]:
        with open("/proc/net/snmp", encoding="utf-8") as file:
            yield from (line.split() for line in file if line.startswith("Tcp:"))

    names, numbers = rows()
    return {"retransmits_total": int(numbers[names.index("RetransSegs")])}
