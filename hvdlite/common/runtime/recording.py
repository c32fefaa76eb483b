"""The timeline of a worker of an elastic job, which goes on from world to world in one file."""

from __future__ import annotations

import os

from hvdlite.common.membership.frames import World
from hvdlite.common.plain.config import Config
from hvdlite.common.timeline.recorder import Timeline, path_of_rank, path_of_world

DYNAMIC = "dynamic"


def timeline_of_settings(config: Config) -> tuple[str, bool] | None:
    """Return the file that the settings name, and whether cycles are marked; None without one."""
    path = config.timeline
    if not path or path.upper() == DYNAMIC.upper():
        return None
    return path, config.timeline_mark_cycles


class Recording:
    """The timeline of one rank, and which file it is wanted in."""

    def __init__(self, config: Config, rank: int) -> None:
        self.timeline = Timeline(rank)
        self._all_ranks = config.timeline_all_ranks
        # The file and whether cycles are marked; None where no timeline is wanted. All ranks know
        # it, as each may become rank 0.
        self._wanted = timeline_of_settings(config)
        self._place: tuple[int, int] | None = None  # Rank and size in the last world.
        # The epoch of a world that follows another one: files of that one must not be overwritten,
        # also where their rank is dead and another one has its number.
        self._epoch = 0

    def start(self, path: str, mark_cycles: bool) -> None:
        """Record to a file from now on, if this is a rank that does. Raises `OSError`."""
        self._wanted = path, mark_cycles
        if not self._all_ranks and self.timeline.rank != 0:
            return
        file = self._file(path)
        if self._epoch and not self.timeline.records_to(file) and os.path.exists(file):
            file = self._file(path_of_world(path, self._epoch))
        self.timeline.record_to(file, mark_cycles)

    def _file(self, path: str) -> str:
        return path_of_rank(path, self.timeline.rank) if self._all_ranks else path

    def stop(self) -> None:
        """Complete the file, and want none."""
        self._wanted = None
        self.timeline.close()

    def begin(self) -> None:
        """Record what is wanted, unless the file of an earlier world goes on. Raises `OSError`."""
        if self._wanted is not None and not self.timeline.enabled:
            self.start(*self._wanted)

    def enter(self, world: World, follows: bool) -> None:
        """Begin a world, which `follows` another one of the job or not."""
        old, self._place = self._place, (world.rank, world.size)
        self._epoch = world.epoch if follows else 0
        self.timeline.rank = world.rank
        if old is not None:
            self.timeline.reset(world.epoch, old, self._place)

    def leave(self) -> None:
        """End the rows of a world that is over."""
        self.timeline.end_rows()
