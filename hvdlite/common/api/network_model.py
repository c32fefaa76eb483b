"""Measure the network model of a job that runs, and compare it with allreduces; all ranks call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from hvdlite.common.api.forms import Forms
from hvdlite.common.api.objects import allgather_object
from hvdlite.common.api.runner import EngineRunner
from hvdlite.common.base.topology import Topology
from hvdlite.common.collectives import measure
from hvdlite.common.collectives.costs import COSTS, Model, cheapest, inside_hosts
from hvdlite.common.plain.numpy_adapter import Array, NumpyAdapter
from hvdlite.common.runtime import state
from hvdlite.common.runtime.probe import run_on_engine
from hvdlite.common.runtime.process_sets import global_process_set

_forms: Forms[Array] = Forms(EngineRunner(NumpyAdapter()))

LEAST_BYTES, MOST_BYTES = 256 << 10, 64 << 20  # in one measurement of a link
ENOUGH_SECONDS = 0.1
LOCAL_BYTES = 8 << 20


def measured_model() -> Model:
    """Measure this job's hosts, of which it has several; return the same model on every rank."""
    runtime = state.current()
    transport, topology = runtime.transport, runtime.topology
    default = Model()
    local = _on_all(lambda: measure.local_message_seconds(transport))
    nbytes = _on_all(
        lambda: measure.local_byte_seconds(transport, runtime.engine.backends, LOCAL_BYTES)
    )
    work = _on_all(measure.work_seconds)
    near = _link_seconds(1)
    far = _link_seconds(len(topology.hosts) // 2) if len(topology.hosts) > 3 else near
    return Model(
        message=_middle(_on_all(lambda: measure.message_seconds(transport))),
        byte=near,
        far_byte=max(near, far),  # Far links are no faster: the rest is noise.
        local_message=_middle(local) or default.local_message,
        local_byte=_middle(nbytes) or default.local_byte,
        **{name: median(each[name] for each in work) for name in work[0]},
    )


def compared_algorithms(
    model: Model, sizes: Sequence[int], calls: int
) -> list[tuple[int, list[tuple[float, float]], str]]:
    """Return, for each size, what each algorithm takes by the model and measured, and the choice.

    The measured time is the median of `calls` calls, each as long as on the slowest rank.
    """
    runtime = state.current()
    found = []
    for size in sizes:
        array = np.zeros(max(1, size // 4), np.float32)
        times = []
        for name in COSTS:
            every = _on_all(
                lambda name=name, array=array: measure.allreduce_seconds(
                    runtime.transport, runtime.engine.backends, name, array, calls
                )
            )
            slowest = [max(each) for each in zip(*every, strict=True)]
            times.append((predicted_seconds(model, runtime.topology, name, size), median(slowest)))
        hosts, slices = len(runtime.topology.hosts), measure.taking_part(runtime.transport)
        found.append((size, times, cheapest(model, hosts, slices, size)))
    return found


def predicted_seconds(model: Model, topology: Topology, name: str, nbytes: int) -> float:
    """Return what an allreduce by the algorithm `name` takes by the model, with hosts like these.

    What goes on inside hosts goes on at the same time as what goes on between them.
    """
    slices = min(len(host) for host in topology.hosts)
    most = max(len(host) for host in topology.hosts)
    between = COSTS[name](model, len(topology.hosts), slices, nbytes)
    inside = inside_hosts(model, most, nbytes)
    return between.steps + max(between.wire, between.work + inside)


def _link_seconds(distance: int) -> float:
    """Return the seconds of a byte over a host's link, in a measurement that is long enough."""
    transport, nbytes = state.current().transport, LEAST_BYTES
    while True:
        seconds = max(
            _on_all(lambda nbytes=nbytes: measure.shift_seconds(transport, distance, nbytes))
        )
        if seconds >= ENOUGH_SECONDS or nbytes >= MOST_BYTES:
            return seconds / nbytes
        nbytes *= 4


def _on_all(probe: Callable[[], Any]) -> list[Any]:
    """Run `probe` on all ranks at the same time; return what it gave, by rank."""

    def together(name: str) -> None:
        _forms.broadcast(np.zeros(1), 0, name, global_process_set)

    return allgather_object(run_on_engine(state.current(), "hvdlite.probe", together, probe))


def _middle(values: Iterable[float | None]) -> float:
    """Return the median of what was measured; 0 if nothing was."""
    known = [value for value in values if value]
    return median(known) if known else 0.0
