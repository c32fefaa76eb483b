"""Run a function on the engine threads of all ranks at the same time: for measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from hvdlite.common.plain.entries import SegmentRun
from hvdlite.common.runtime.runtime import Runtime

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
