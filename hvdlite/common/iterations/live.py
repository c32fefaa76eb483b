"""The counts of this rank while it runs: `hvd.metrics()` and `hvd.progress()`.

Nothing is counted before somebody asks: by ``HVDLITE_LIVE=1``, which `hvdlite-run
--metrics-port` sets, or by the first `metrics()`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hvdlite.common.iterations.trace import Following, trace_by_setting
from hvdlite.common.runtime.current import current
from hvdlite.common.runtime.recording import Trainers
from hvdlite.common.runtime.runtime import Runtime

if TYPE_CHECKING:
    from hvdlite.common.iterations.counts import Counts


def counts_of(runtime: Runtime) -> Counts:
    """Return the counts of a rank, which begin with the first call."""
    from hvdlite.common.iterations.counts import Counts

    trainers = runtime.trainers
    if trainers.counts is None:
        trainers.counts = Counts(runtime)
    assert isinstance(trainers.counts, Counts)
    return trainers.counts


def traces_of_loops() -> list[Following]:
    """Return what wants to know the iterations of a loop that has no trainer.

    That are the trace that the settings ask for, and the counts where there are some. Raises as
    `trace_iterations`.
    """
    found = [trace_by_setting(), current().trainers.counts]
    return [trace for trace in found if isinstance(trace, Following)]


def _begin_by_setting(runtime: Runtime) -> None:
    if runtime.config.live:
        counts_of(runtime)


Trainers.on_begin.append(_begin_by_setting)


def metrics() -> dict[str, float]:
    """Return what this rank has counted: numbers by name, to be handed to a logger.

    The names are those of docs/live_view.md; numbers by collective have names such as
    ``collective_bytes_total.allreduce``. Counting begins at `init` with ``HVDLITE_LIVE=1`` (as
    ``hvdlite-run --metrics-port`` sets it), otherwise with the first call. Raises `ValueError`
    before `init`.
    """
    return counts_of(current()).values()


def progress(total: int, done: int = 0) -> None:
    """Say how many steps the whole training has, and how many of them are `done`.

    One call before the loop is enough where steps are counted: with a `DistributedOptimizer` of
    PyTorch, and in ``fit`` of Keras. In other loops call it in each step. Raises `ValueError` for
    numbers below 0, and before `init`.
    """
    if total < 0 or done < 0:
        raise ValueError(f"progress({total}, {done}): steps are numbers of at least 0")
    trainers = current().trainers
    counts = trainers.counts
    steps = 0 if counts is None else counts.steps  # type: ignore[attr-defined]
    trainers.progress = (total, done - steps)


__all__ = ["metrics", "progress"]
