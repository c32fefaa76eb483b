"""One rank of a job in a world: a real engine, and the script that its training thread runs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from hvdlite.common.base.errors import HorovodInternalError
from hvdlite.common.engine.engine import Engine
from hvdlite.common.requests.entries import SegmentRun
from hvdlite.common.settings.config import Config
from hvdlite.common.timeline.recorder import Timeline
from tests.simulation.ranks.programs import Quit
from tests.simulation.ranks.script import BLAME, ENDS, Script, Step
from tests.simulation.world import BrokenError, in_a_thread

if TYPE_CHECKING:
    from tests.simulation.ranks.job import Job


class EngineThread:
    """Has of `threading.Thread` what an engine uses; its thread was that of another one before."""

    def __init__(self, target: Callable[[], None], **_: object) -> None:
        self._target, self._runs = target, False

    def start(self) -> None:
        self._runs = True
        in_a_thread(self._run)

    def _run(self) -> None:
        try:
            self._target()
        finally:
            self._runs = False

    def is_alive(self) -> bool:
        return self._runs


class Rank(Script):
    """One rank: its engine, and the script that its training thread would run."""

    def __init__(self, job: Job, rank: int, config: Config) -> None:
        self.rank = rank
        self.name = f"rank {rank}"
        self.code: int | None = None
        self.ended_at = 0.0
        self.ran: list[SegmentRun] = []
        self._job, self._lot = job, random.Random(job.program.seed * 1000 + rank)
        self.end = job.network.ends[rank]
        self.engine = Engine(self.end, config, Timeline(rank), job.world.clock)
        self.engine.observe(self.ran.append)
        self._script = self.run()
        self._steps = 0
        self._steps_late = False  # When it goes on after a stop.
        self._waits: Callable[[], bool] | None = None
        self._waits_for = ""
        self.end.process.on_pause = self.look

    def start(self) -> None:
        self.end.process.begin(self.engine.start)
        self._job.world.after(self._job.world.soon(), self.step)

    @property
    def lives(self) -> bool:
        return self.code is None

    def look(self) -> None:
        """Go on if what the script waits for has come."""
        if self._waits is not None and self._waits():
            self._waits = None
            self._job.world.after(self._job.world.soon(), self.step, anywhere=True)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left of it."""
        return self.end.closed or self.end.process.killed

    def go_on(self) -> None:
        """Go on after a stop."""
        self.end.process.go_on()
        if self._steps_late:
            self._steps_late = False
            self.step()

    def step(self) -> None:
        """Run the script up to its next pause."""
        if not self.lives:
            return
        if self.end.process.stopped:
            self._steps_late = True
            return
        self._job.progress = self._job.world.now
        self._steps += 1
        if Quit(self.rank, self._steps) in self._job.program.quits:
            self._job.quitters.add(self.rank)
            self._fail("raises ValueError")
            return
        try:
            pause = next(self._script)
        except StopIteration:
            self.finish(0, "ends")
        except HorovodInternalError as error:
            self._check_blame(error)
            self._fail(f"fails: {error}")
        except BrokenError:
            raise
        except Exception as error:
            raise BrokenError(ENDS, f"{self.name}: {type(error).__name__}: {error}") from error
        else:
            self._pause(pause)

    def _fail(self, text: str) -> None:
        """End by an exception: the engine has failed, or is shut down with the process."""
        self.finish(1, text)
        self._script = self.leave("")
        next(self._script)

    def finish(self, code: int, word: str) -> None:
        self.code, self.ended_at = code, self._job.world.now
        self._job.world.tell(self.name, word)

    def waiting(self) -> str:
        return f"{self.name} waits for {self._waits_for or 'its turn'}"

    def _pause(self, pause: Step) -> None:
        if isinstance(pause, float):
            self._job.world.after(pause + self._job.world.soon(), self.step, anywhere=True)
            return
        if callable(pause):
            self._waits_for, self._waits = "the end of its shutdown", pause
        else:
            entries = [entry for entry in pause if not entry.handle.poll()]
            self._waits_for = ", ".join(repr(entry.request.name) for entry in entries)
            for entry in entries:
                entry.handle.on_end(lambda: None)
            self._waits = lambda: all(entry.handle.poll() for entry in entries)
        self._job.world.after(0.0, self.look, anywhere=True)

    def _check_blame(self, error: HorovodInternalError) -> None:
        """An error must come from a rank that was killed or has ended, and name it."""
        killed, quitters = self._job.killed, self._job.quitters
        cuts = self._job.cuts
        if error.rank in killed | cuts:
            return
        # Another rank may have ended by the first loss, and this one needs it.
        ended = (
            {rank.rank for rank in self._job.ranks if rank.code == 1} if killed | cuts else set()
        )
        if quitters:
            ended |= {rank.rank for rank in self._job.ranks if not rank.lives}
        if error.job_goes_on and any(f"rank {r} " in str(error) for r in sorted(ended)):
            return
        # All are dead who would have told it of the first loss.
        if error.rank in ended and self._job.network.neighbours(self.rank) <= killed:
            return
        text = f"{self.name} fails; {sorted(killed)} were killed, {sorted(quitters)} have quit"
        text += f", connections of {sorted(cuts)} were cut"
        raise BrokenError(BLAME, f"{text}: {error}")
