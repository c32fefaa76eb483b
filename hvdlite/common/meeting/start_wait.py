"""How long `init` waits for the other ranks, when it says so, and in which words."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import NamedTuple

from hvdlite.common.base.errors import HorovodInternalError

log = logging.getLogger("hvdlite")

LINE_SECONDS = 30.0  # The time between two log lines of a rank that waits.
LINES = 4  # The least number of log lines before a rank gives up.
REMEDY = "HVDLITE_START_TIMEOUT (seconds) and hvdlite-run --start-timeout"


class StartWait:
    """The wait of one rank in `init`, from now to `deadline` (monotonic seconds)."""

    def __init__(self, rank: int, size: int, deadline: float) -> None:
        self.deadline = deadline
        self.limit_seconds = max(0.0, deadline - time.monotonic())
        self._limit = f"{round(self.limit_seconds, 1):g}"
        self._rank = rank
        self._who = f"rank {rank} of {size}" if size > 0 else "this rank"
        self._began, self._began_at = time.monotonic(), time.strftime("%H:%M:%S")
        self._period = max(0.01, min(LINE_SECONDS, self.limit_seconds / LINES))
        self._line_at = self._began + self._period

    @property
    def over(self) -> bool:
        return time.monotonic() >= self.deadline

    def seconds(self) -> float:
        """Return how long to sleep until there is something to say."""
        return max(0.0, min(self.deadline, self._line_at) - time.monotonic())

    def line_is_due(self) -> bool:
        """Return whether it is time for a log line; each is due once."""
        if time.monotonic() < self._line_at:
            return False
        self._line_at += self._period
        return True

    def tell(self, presence: Presence) -> None:
        """Log who is missing if this rank speaks; raise `error` if it has waited for too long."""
        if self.over:
            raise self.error(presence.spell())
        if self._rank == min(presence.waiting, default=None):  # It speaks for all that wait.
            self.log(presence.spell())

    def log(self, who: str) -> None:
        """Log which ranks are missing, as `who` says."""
        log.warning("%s; the limit is %s s: %s set it", self._waiting(who), self._limit, REMEDY)

    def error(self, who: str) -> HorovodInternalError:
        """Return the error of a rank that has waited for too long."""
        return HorovodInternalError(
            f"{self._waiting(who)}; the limit is {self._limit} s: {REMEDY} set it. A rank "
            "that ended before init(), or took another branch, never comes: call init() first, "
            "and unconditionally"
        )

    def _waiting(self, who: str) -> str:
        seconds = time.monotonic() - self._began
        return f"{self._who} has waited {seconds:.0f} s in init(), since {self._began_at}: {who}"


class Presence(NamedTuple):
    """Who has come to a round of a meeting, and who has not."""

    missing: list[int]
    waiting: list[int]
    left: list[int]  # Those who came and did not wait for the end.
    notes: list[str]  # Sentences about ranks that were refused.
    # Those of other hosts that came; None where only the ranks of this host are known.
    elsewhere: list[int] | None

    def spell(self) -> str:
        """Return the sentence that names the ranks that did not come."""
        where = "" if self.elsewhere is not None else " on this host"
        came = [*self.waiting, *self.left, *(self.elsewhere or ())]
        seen = f"(seen{where}: {spell_ranks(came) or 'none'})"
        if self.missing:
            sentence = f"these ranks did not come: {spell_ranks(self.missing)} {seen}"
        elif self.left:
            sentence = f"these ranks came and left again: {spell_ranks(self.left)} {seen}"
        else:
            sentence = f"ranks of other hosts did not come {seen}"
        return "; ".join((sentence, *self.notes))


def spell_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, runs of them abbreviated: ``0, 2-7``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = (
        f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs
    )  # fmt: skip
    return ", ".join(words)
