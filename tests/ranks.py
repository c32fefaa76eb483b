"""Ranks as threads of one process: how most tests run a job of several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.topology import Topology
from hvdlite.common.plain.config import Config
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.runtime.state import use
from hvdlite.common.transport.inprocess import InProcessWorld

TIME_LIMIT_SECONDS = 60


def run_ranks(
    size: int,
    main: Callable[[int], Any],
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    config: Config | None = None,
) -> list[Any]:
    """Run ``main(rank)`` on every rank; the results in rank order, or the first error raised."""
    topology = Topology(tuple(map(tuple, hosts))) if hosts else Topology.single_host(size)
    world = InProcessWorld(topology)
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size
    global_process_set._bind(0, range(size))

    def body(rank: int) -> None:
        try:
            runtime = Runtime(world.transport(rank), config or Config())
            try:
                with use(runtime):
                    results[rank] = main(rank)
            finally:
                runtime.shutdown()
        except BaseException as error:  # reported by the main thread
            errors[rank] = error

    threads = [
        threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIME_LIMIT_SECONDS)
    global_process_set.ranks = None
    for error in errors:
        if error is not None:
            raise error
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"still running: {stuck}"
    return results
