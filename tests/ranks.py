"""Ranks as threads of one process: how most tests run a job of several ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from hvdlite.common.base.topology import Topology
from hvdlite.common.runtime.current import use
from hvdlite.common.runtime.process_sets import global_process_set
from hvdlite.common.runtime.runtime import Runtime
from hvdlite.common.settings.config import Config
from tests.limits import HANG_SECONDS
from tests.worlds import IN_PROCESS, make_world


def run_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run ``body(rank)`` in a thread for each rank; the results in rank order.

    Raises the first error in rank order. Fails when a rank runs longer than `HANG_SECONDS`.
    """
    results: list[Any] = [None] * size
    errors: list[BaseException | None] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # reported by the main thread
            errors[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"rank-{rank}", daemon=True)
        for rank in range(size)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_SECONDS)
    for error in errors:
        if error is not None:
            raise error
    stuck = [thread.name for thread in threads if thread.is_alive()]
    assert not stuck, f"still running: {stuck}"
    return results


def run_ranks(
    size: int,
    main: Callable[[int], Any],
    *,
    hosts: Sequence[Sequence[int]] | None = None,
    config: Config | None = None,
    transport: str = IN_PROCESS,
) -> list[Any]:
    """Run ``main(rank)`` on every rank; the results in rank order, or the first error raised."""
    topology = Topology(tuple(map(tuple, hosts))) if hosts else Topology.single_host(size)
    world = make_world(transport, topology, config)
    global_process_set._bind(0, range(size))

    def body(rank: int) -> Any:
        runtime = Runtime(world.transport(rank), config or Config())
        try:
            runtime.follow_settings()
            with use(runtime):
                return main(rank)
        finally:
            runtime.shutdown()

    try:
        return run_threads(size, body)
    finally:
        global_process_set.ranks = None
