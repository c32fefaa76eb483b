"""What lasts from world to world: the timeline of a rank, and who trains in it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol
from weakref import WeakSet

from hvdlite.common.driver_link.frames import World
from hvdlite.common.settings.config import Config
from hvdlite.common.timeline.recorder import Timeline, path_of_rank, path_of_world

# Register trainers and traces, and connect them in whichever order they appear.


log = logging.getLogger("hvdlite")


class TraceLike(Protocol):
    """The interface of an iteration trace."""

    def follow(self, trainer: Any) -> None:
        """Record the iterations of a trainer from now on."""

    def enter(self, runtime: Any) -> None:
        """Go on in another world of an elastic job, that of `runtime`."""

    def stop(self) -> None:
        """Record nothing any more; idempotent."""


class Earlier(NamedTuple):
    """What goes on where a process calls `init` again after a shutdown; it keeps nothing alive."""

    trainers: WeakSet[Any]
    traces: int  # How many of its runtimes have begun the trace of the settings.


class Trainers:
    """The trainers of one rank, such as optimizers, and the traces that follow each of them."""

    # Called with each runtime that has begun: who counts is imported above this package.
    on_begin: ClassVar[list[Callable[[Any], None]]] = []

    def __init__(self) -> None:
        # The trace that the settings ask for; None until it is switched on.
        self.by_setting: TraceLike | None = None
        # What `hvd.metrics()` has counted; None until it is switched on.
        self.counts: TraceLike | None = None
        # The steps of the whole training, and how many more were done than are counted.
        self.progress: tuple[int, int] | None = None
        # Guards the next two, so that no pair of trainer and trace is missed.
        self._lock = threading.RLock()
        self._trainers: WeakSet[Any] = WeakSet()
        self._traces: list[TraceLike] = []
        self._earlier_traces = 0

    def take_over(self, earlier: Earlier) -> None:
        """Register the trainers that this process has announced before a shutdown."""
        self._trainers.update(earlier.trainers)
        self._earlier_traces = earlier.traces

    def left(self) -> Earlier:
        """Return what the next runtime of this process takes over."""
        begun = self.by_setting is not None
        return Earlier(self._trainers, self._earlier_traces + begun)

    def path_by_setting(self, config: Config) -> str:
        """Return the file of the trace that the settings ask for; "" without one.

        The rows of before a shutdown are not overwritten.
        """
        path, before = config.trace_iterations, self._earlier_traces
        return path_of_world(path, before) if path and before else path

    @property
    def exist(self) -> bool:
        """Whether there is a trainer."""
        return len(self._trainers) > 0

    def announce(self, trainer: Any) -> None:
        """Register a trainer, and let all traces follow it."""
        with self._lock:
            self._trainers.add(trainer)
            traces = list(self._traces)
        for trace in traces:
            trace.follow(trainer)

    def add(self, trace: TraceLike, *, between_steps: bool = False) -> None:
        """Register a trace, and let it follow all trainers, or each one after its next step."""
        with self._lock:
            self._traces.append(trace)
            trainers = list(self._trainers)
        for trainer in trainers:
            if between_steps:
                trainer.call_after_step(partial(trace.follow, trainer))
            else:
                trace.follow(trainer)

    def enter(self, runtime: Any) -> None:
        """Let all traces go on in the world of `runtime`. Raises `OSError`."""
        with self._lock:
            traces = list(self._traces)
        for trace in traces:
            trace.enter(runtime)

    def remove(self, trace: TraceLike) -> None:
        """Forget a trace that was stopped; idempotent."""
        with self._lock:
            if trace in self._traces:
                self._traces.remove(trace)

    def close(self) -> None:
        """Stop all traces at shutdown; a file that cannot be written does not stop the shutdown."""
        for trace in list(self._traces):
            try:
                trace.stop()
            except OSError as error:
                log.warning("an iteration trace could not be completed: %s", error)


DYNAMIC = "dynamic"


class Recording:
    """The timeline of one rank, and which file it is wanted in."""

    def __init__(self, config: Config, rank: int, *, in_world: bool = True) -> None:
        self.timeline = Timeline(rank)
        # Whether the rank is known: that of a newcomer is the expected one.
        self.in_world = in_world
        self._all_ranks = config.timeline_all_ranks
        # The file and whether cycles are marked; None where no timeline is wanted. All ranks know
        # it, as each may become rank 0.
        self._wanted: tuple[str, bool] | None = None
        if config.timeline and config.timeline.upper() != DYNAMIC.upper():
            self._wanted = config.timeline, config.timeline_mark_cycles
        self._place: tuple[int, int] | None = None  # Rank and size in the last world.
        # The epoch of a world that follows another one: files of that one must not be overwritten,
        # also where their rank is dead and another one has its number.
        self._epoch = 0

    @property
    def follows(self) -> bool:
        """Whether this is a later world of an elastic job."""
        return self._epoch > 0

    def start(self, path: str, mark_cycles: bool) -> str:
        """Record to a file from now on, if this is a rank that does; return its name.

        Raises `OSError`.
        """
        self._wanted = path, mark_cycles
        if not self._all_ranks and self.timeline.rank != 0:
            return ""
        file = path_of_rank(path, self.timeline.rank) if self._all_ranks else path
        if not self.timeline.records_to(file):
            file = self.new_file(path, of_rank=self._all_ranks)
        self.timeline.record_to(file, mark_cycles)
        return file

    def new_file(self, path: str, *, of_rank: bool) -> str:
        """Return the name of a file that this rank may write, with its number if `of_rank`.

        What earlier worlds have written, as other ranks with the same number, is not overwritten.
        """
        for each in (path, path_of_world(path, self._epoch)):
            file = path_of_rank(each, self.timeline.rank) if of_rank else each
            if not (self._epoch and os.path.exists(file)):
                break
        return file

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
        self.in_world = True
        self.timeline.rank = world.rank
        if old is not None:
            self.timeline.reset(world.epoch, old, self._place)

    def leave(self) -> None:
        """End the rows of a world that is over."""
        self.timeline.end_rows()


class Lasting(NamedTuple):
    """What records a rank, and goes on from world to world in an elastic job."""

    recording: Recording
    trainers: Trainers

    @classmethod
    def new(cls, config: Config, rank: int, *, in_world: bool = True) -> Lasting:
        return cls(Recording(config, rank, in_world=in_world), Trainers())

    def close(self) -> None:
        """Complete all files, as the process ends."""
        self.trainers.close()
        self.recording.timeline.close()
