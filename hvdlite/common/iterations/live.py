"""The counts of this rank while it runs: `hvd.metrics()` and `hvd.progress()`.

Nothing is counted before somebody asks: by ``HVDLITE_LIVE=1``, which the flags of
hvdlite-run for the live view set, by the first `metrics()` or `progress()`, or by `hvdlite-top`.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING

from hvdlite.common.base.report_failure import launcher_pipe
from hvdlite.common.iterations.following import Following
from hvdlite.common.iterations.trace import trace_by_setting
from hvdlite.common.runtime.current import current, this_process
from hvdlite.common.runtime.recording import Trainers
from hvdlite.common.runtime.runtime import Runtime

if TYPE_CHECKING:
    from hvdlite.common.iterations.counts import Counts


_lock = threading.Lock()  # Guards the beginning of counts.


def counts_of(runtime: Runtime, *, between_steps: bool = False) -> Counts:
    """Return the counts of a rank, which begin with the first call.

    With `between_steps` a thread that does not train may call.
    """
    from hvdlite.common.iterations.counts import Counts

    trainers = runtime.trainers
    with _lock:
        if trainers.counts is None:
            trainers.counts = Counts(runtime, between_steps=between_steps)
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
    if runtime.trainers.exist:  # They were made before a shutdown, and are not announced again.
        trace_by_setting()
    if runtime.config.live:
        counts_of(runtime).tell_launcher()
    if launcher_pipe() is not None:
        from hvdlite.common.iterations import launcher_orders

        def counts() -> Counts:
            own = this_process.runtime
            if own is None:
                raise RuntimeError("hvdlite is not initialized in this rank now")
            return counts_of(own, between_steps=True)

        launcher_orders.obey_launcher(counts)
        launcher_orders.obey_passed_orders(runtime, counts)
        if launcher_orders.launcher_has_asked_to_count(runtime):
            counts_of(runtime, between_steps=True).tell_launcher()


Trainers.on_begin.append(_begin_by_setting)
if launcher_pipe() is not None:  # In `init` the other ranks of an elastic job would wait for it.
    import_module("hvdlite.common.iterations.launcher_orders")


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
    PyTorch, and in ``fit`` of Keras. In other loops call it in each step. Counting begins with the
    first call: who looks later learns how many steps were made until then. Raises `ValueError`
    for numbers below 0, and before `init`.
    """
    if total < 0 or done < 0:
        raise ValueError(f"progress({total}, {done}): steps are numbers of at least 0")
    runtime = current()
    runtime.trainers.progress = (total, done - counts_of(runtime).steps)


__all__ = ["metrics", "progress"]
