"""What the launcher knows of a job while it runs, from the lines that its ranks send each second.

Without I/O and clock: who calls gives the time in seconds, of which only differences count.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import NamedTuple

from hvdlite.common.base.metrics import METRICS, Sample, unpack
from hvdlite.launcher.live.stragglers import Pace, Straggler, Watch

# Changes are those over the last so many seconds, or more where there were fewer steps.
WINDOW_SECONDS = 6.0
FEWEST_STEPS = 3
MOST_MOMENTS = 30
MOST_EVENTS = 20
LONGEST_EVENT = 600
# Since the last step of a rank; after that it counts as standing still.
STILL_SECONDS, STILL_STEPS = 5.0, 5
PAUSE_SECONDS = 2.0  # Without a step: nobody makes the others wait a part of one.
SILENT_SECONDS = 5.0  # A rank sends each second.

WORLD, STALL, FAILURE, STRAGGLER = KINDS = ("world", "stall", "failure", "straggler")
OTHER = ""  # The kind of events that are not counted.


class Moment(NamedTuple):
    """What a rank had counted when its line came."""

    at: float
    values: dict[str, float]


class Event(NamedTuple):
    """Something that has occurred in the job."""

    at: float
    kind: str
    text: str


class RankView:
    """One rank: its place, and what it has counted of late."""

    def __init__(self, rank: int, host: str, number: int) -> None:
        self.rank, self.host = rank, host
        self.number = number  # The launcher's name of its process.
        self.tensor = ""  # For which it has waited longest of late.
        self._moments: list[Moment] = []  # Changes are counted from the first one on.
        self._stepped_at = 0.0

    def add(self, at: float, sample: Sample) -> None:
        """Take what the rank has counted until now."""
        moment = Moment(at, sample.values)
        if self._moments and _steps(moment) < _steps(self._moments[-1]):
            self._moments.clear()  # It counts anew.
        if not self._moments or _steps(moment) > _steps(self._moments[-1]):
            self._stepped_at = at
        self.tensor = sample.tensor
        self._moments.append(moment)
        while len(self._moments) > 2 and _suffices(self._moments[1], moment):
            del self._moments[0]
        if len(self._moments) > MOST_MOMENTS:
            del self._moments[-2]

    @property
    def values(self) -> dict[str, float]:
        """What it has counted since it began."""
        return self._moments[-1].values

    def age(self, now: float) -> float:
        """Return how long ago it was heard of, in seconds."""
        return now - self._moments[-1].at

    @property
    def seconds(self) -> float:
        """Over how long `changes` are counted."""
        return self._moments[-1].at - self._moments[0].at

    def changes(self) -> dict[str, float]:
        """Return by how much its numbers have grown of late."""
        first = self._moments[0].values
        return {name: value - first.get(name, 0.0) for name, value in self.values.items()}

    def lately(self) -> dict[str, float]:
        """Return the means of numbers that do not grow only: one moment tells little of them."""
        return {
            name: sum(each.values.get(name, value) for each in self._moments) / len(self._moments)
            for name, value in self.values.items()
            if not METRICS[name.partition(".")[0]].counts
        }

    def steps_a_second(self, now: float) -> float:
        """Return its speed; 0 where it stands still, or counts no steps."""
        steps, seconds = self._grown("steps_total"), self._grown("step_seconds_total")
        if steps <= 0 or seconds <= 0:
            return 0.0
        return 0.0 if self.is_still(now) else steps / seconds

    def is_still(self, now: float, least: float = STILL_SECONDS) -> bool:
        """Return whether it has made steps, and makes none any more."""
        steps, seconds = self._grown("steps_total"), self._grown("step_seconds_total")
        longest = max(least, STILL_STEPS * seconds / steps if steps > 0 else 0.0)
        return _steps(self._moments[-1]) > 0 and now - self._stepped_at > longest

    def _grown(self, name: str) -> float:
        """Return by how much one number has grown of late, as `changes` does for all of them."""
        return self.values.get(name, 0.0) - self._moments[0].values.get(name, 0.0)


def _steps(moment: Moment) -> float:
    return moment.values.get("steps_total", 0.0)


def _suffices(first: Moment, last: Moment) -> bool:
    steps = _steps(last) - _steps(first)
    enough = steps >= FEWEST_STEPS or not _steps(last)
    return enough and last.at - first.at >= WINDOW_SECONDS


class JobView:
    """The job: its ranks, and the last events."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankView] = {}
        self.events: deque[Event] = deque(maxlen=MOST_EVENTS)
        self.counted: Counter[str] = Counter()  # Events by kind.
        self.watch = Watch()
        self._world = 0.0

    def take(self, host: str, number: int, line: str, now: float) -> Sample | None:
        """Take the line of a process; None where it is none, or of a world that is over."""
        sample = unpack(line)
        if sample is None or sample.values.get("world", 0.0) < self._world:
            return None
        self._world = sample.values.get("world", 0.0)
        for gone in [rank for rank in self.ranks if rank >= sample.size]:
            del self.ranks[gone]
        view = self.ranks.get(sample.rank)
        if view is None or view.number != number:
            view = self.ranks[sample.rank] = RankView(sample.rank, host, number)
        view.add(now, sample)
        return sample

    def note(self, kind: str, text: str, now: float) -> None:
        """Keep an event."""
        if kind:
            self.counted[kind] += 1
        text = text.encode(errors="replace").decode()  # Half a character cannot be sent on.
        self.events.append(Event(now, kind, " ".join(text.split())[:LONGEST_EVENT]))

    def paces(self, now: float) -> list[Pace]:
        """Return how the ranks have spent their last seconds.

        None while one is not heard of, or makes no steps any more: they may wait for ever.
        """
        ranks = self.in_order()
        if any(
            rank.age(now) > SILENT_SECONDS or rank.is_still(now, PAUSE_SECONDS) for rank in ranks
        ):
            return []
        return [
            Pace(each.rank, each.host, each.seconds, each.changes(), each.lately())
            for each in ranks
        ]

    def look(self, now: float) -> Straggler | None:
        """Look, once a second, who makes the others wait; return who is to be named now."""
        named = self.watch.look(self.paces(now), now)
        if named is not None:
            self.note(STRAGGLER, named.text, now)
        return named

    def in_order(self) -> list[RankView]:
        """Return the ranks in their order."""
        return [self.ranks[rank] for rank in sorted(self.ranks)]
