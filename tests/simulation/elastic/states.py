"""The state of a worker of an elastic job: the real one, and the real code that syncs it.

What goes from rank to rank in a sync comes from the world, when all have come to it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hvdlite.common.driver_link.frames import World
from hvdlite.common.elastic import run, source, state
from hvdlite.common.elastic.state import ObjectState


class _Runtime:
    """Has what a sync asks of the runtime of a rank."""

    config = SimpleNamespace(elastic_check=False)


class WorkerState(ObjectState):
    """The values of a worker: a number to which each step adds."""

    step: int
    total: int

    def __init__(self) -> None:
        super().__init__(self._bcast_nothing, lambda: 0, step=0, total=0)
        self._runtime: Any = _Runtime()
        self._loop = run._Loop(self, lambda _commit: None, run.is_loss, own_reset=False)
        self._begin()

    @staticmethod
    def _bcast_nothing(_value: Any) -> Any:
        raise AssertionError("a world says who is the root of a sync")

    @property
    def number(self) -> int:
        """The number of the commit that is held."""
        return self._held_commit()

    def sync_in(self, world: World, rank: int, root: WorkerState) -> None:
        """Begin in a world, in which this is the state of `rank`, and `root` that of its root."""

        def broadcast(value: Any, root_rank: int, *, process_set: Any) -> Any:
            assert (root_rank, process_set.included()) == (world.root, True)
            sent = value if rank == world.root else root._saved_state
            return pickle.loads(pickle.dumps(sent))

        @contextmanager
        def source_of(world: World) -> Iterator[None]:
            takes_part = rank in {world.root, *world.behind}
            members: Any = SimpleNamespace(included=lambda: takes_part)
            token = source._source.set(source.Source(world.root, members))
            try:
                yield
            finally:
                source._source.reset(token)

        worlds = SimpleNamespace(elastic=lambda: True, current_world=lambda: world)
        with (
            patch.object(run, "worlds", worlds), patch.object(run, "source_of", source_of),
            patch.object(run, "find", lambda: self._runtime),
            patch.object(state, "broadcast_object", broadcast),
        ):  # fmt: skip
            self._loop._sync()
