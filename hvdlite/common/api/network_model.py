"""Measure the network model of a job that runs, and compare it with allreduces; all ranks call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from statistics import linear_regression, median
from typing import Any, TypeVar

import numpy as np

from hvdlite.common.api.objects import allgather_object, array_forms
from hvdlite.common.collectives.between_hosts import measure
from hvdlite.common.collectives.between_hosts.costs import (
    ALLREDUCE,
    COSTS,
    Model,
    cheapest,
    step_seconds,
)
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.runtime.runtime import Runtime

# Run a function on the engine threads of all ranks at the same time: for measurements.


Result = TypeVar("Result")


def run_on_engine(
    runtime: Runtime, name: str, collective: Callable[[str], object], probe: Callable[[], Result]
) -> Result:
    """Run `probe` on the engine thread right after the collective `name`; return its result.

    `collective` runs that collective by its name, which no other call has at the time. All ranks
    call this at the same time, and may send and receive in `probe` by the transport. An error in
    `probe` ends the job, and `collective` raises it.
    """
    results: list[Result] = []

    def observe(run: SegmentRun) -> None:  # Called before the call of `collective` returns.
        if any(each.endswith(name) for each in run.names):  # "broadcast." may precede it.
            results.append(probe())

    remove = runtime.engine.observe(observe)
    try:
        collective(name)
    finally:
        remove()
    return results[0]


LEAST_BYTES, MOST_BYTES = 256 << 10, 64 << 20  # in one measurement of a link
ENOUGH_SECONDS = 0.2
SMALL_CALLS, SMALL_BYTES, FAR_CALLS = 8, 512, 2
LOCAL_BYTES = 8 << 20


def measured_model() -> Model:
    """Measure this job's hosts, of which it has several; return the same model on every rank."""
    runtime = current()
    transport, default = runtime.transport, Model()
    local = _on_all(lambda: measure.local_message_seconds(transport))
    local_bytes = _on_all(
        lambda: measure.local_byte_seconds(transport, runtime.engine.backends, LOCAL_BYTES)
    )
    work = _on_all(measure.work_seconds)
    call, message = _call_and_message()
    message = max(message, _middle(_on_all(lambda: measure.message_seconds(transport))))
    near, nbytes = _link_seconds(message)
    return Model(
        call=call,
        message=message,
        byte=near,
        far_byte=max(near, _far_seconds(nbytes, call, message)),  # Less would be noise.
        local_message=_middle(local) or default.local_message,
        local_byte=_middle(local_bytes) or default.local_byte,
        **{name: median(each[name] for each in work) for name in work[0]},
    )


def compared_algorithms(
    model: Model, sizes: Sequence[int], calls: int
) -> list[tuple[int, list[tuple[float, float]], str]]:
    """Return, for each size, what each algorithm takes by the model and measured, and the choice.

    The measured time is the median of three means over `calls` calls.
    """
    runtime = current()
    hosts = tuple(map(len, runtime.topology.hosts))
    slices = measure.taking_part(runtime.transport)
    found = []
    for size in sizes:
        times = [
            (step_seconds(model, name, hosts, size), _measured_seconds(name, size, calls))
            for name in COSTS[ALLREDUCE]
        ]
        found.append((size, times, cheapest(model, len(hosts), slices, size)))
    return found


def compared_steps(
    model: Model, tensors: int, nbytes: int, calls: int
) -> dict[str, tuple[float, float]]:
    """Return what `tensors` of `nbytes` each take as one segment, by algorithm.

    By the model, and measured.
    """
    hosts = tuple(map(len, current().topology.hosts))
    return {
        name: (
            step_seconds(model, name, hosts, tensors * nbytes, tensors),
            _measured_seconds(name, nbytes, calls, tensors),
        )
        for name in COSTS[ALLREDUCE]
    }


def _call_and_message() -> tuple[float, float]:
    """Return the time of a call and of a round, by a line through small allreduces of all kinds."""
    hosts = len(current().topology.hosts)
    rounds = [
        COSTS[ALLREDUCE][name](Model(), hosts, 1, SMALL_BYTES).rounds for name in COSTS[ALLREDUCE]
    ]
    times = [_measured_seconds(name, SMALL_BYTES, SMALL_CALLS) for name in COSTS[ALLREDUCE]]
    if len({*rounds}) < 2:
        return 0.0, median(times) / rounds[0]
    slope, start = linear_regression(rounds, times)
    if start < 0 or slope <= 0:
        return 0.0, median(t / r for t, r in zip(times, rounds, strict=True))
    return start, slope


def _measured_seconds(name: str, nbytes: int, calls: int, tensors: int = 1) -> float:
    """Return the time of an allreduce by an algorithm, on the slowest rank."""
    runtime = current()
    arrays = [np.zeros(max(1, nbytes // 4), np.float32) for _ in range(tensors)]
    transport, backends = runtime.transport, runtime.engine.backends
    times = _on_all(lambda: measure.allreduce_seconds(transport, backends, name, arrays, calls))
    # The median of the batches, each on the rank where it took longest.
    return float(median(max(each) for each in zip(*times, strict=True)))


def _far_seconds(nbytes: int, call: float, message: float) -> float:
    """Return the seconds of a byte as halving sends it: far, and over many connections in bursts.

    `nbytes` are so many that the links take most of the time.
    """
    hosts = len(current().topology.hosts)
    if hosts < 4:
        return 0.0  # All are near.
    nothing = Model(*[0.0] * len(Model.names()))
    cost = COSTS[ALLREDUCE]["halving"](replace(nothing, far_byte=1.0), hosts, 1, nbytes)
    seconds = _measured_seconds("halving", nbytes, FAR_CALLS) - call - cost.rounds * message
    return seconds / cost.wire


def _link_seconds(message: float) -> tuple[float, int]:
    """Return the seconds of a byte over a host's link, and the bytes of a measurement.

    They are so many that it takes long enough. The time of a first `message` is left out.
    """
    transport, nbytes = current().transport, LEAST_BYTES
    while True:
        seconds = max(_on_all(partial(measure.shift_seconds, transport, nbytes)))
        if seconds - message >= ENOUGH_SECONDS or nbytes >= MOST_BYTES:
            return max(seconds - message, seconds / 10) / nbytes, nbytes
        nbytes *= 4


def _on_all(probe: Callable[[], Any]) -> list[Any]:
    """Run `probe` on all ranks at the same time; return what it gave, by rank."""

    def together(name: str) -> None:
        array_forms.broadcast(np.zeros(1), 0, name, global_process_set)

    return allgather_object(run_on_engine(current(), "hvdlite.probe", together, probe))


def _middle(values: Iterable[float | None]) -> float:
    """Return the median of what was measured; 0 if nothing was."""
    known = [value for value in values if value]
    return median(known) if known else 0.0
