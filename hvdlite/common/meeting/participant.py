"""A rank that takes part in a meeting at a server, as both of its exchanges are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.common.meeting.wire import JOB_BYTES


@dataclass(frozen=True)
class Participant:
    """World rank `rank` of a job of `size` ranks, which waits until `deadline` (monotonic seconds).

    `members` are the world ranks that meet, in the order of their new numbers; None is all of
    `size`. `secret` and `job` are those of the server.
    """

    rank: int
    size: int
    secret: bytes
    deadline: float
    members: Sequence[int] | None = None
    job: bytes = bytes(JOB_BYTES)

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among those that meet, and how many they are."""
        if self.members is None:
            return self.rank, self.size
        return self.members.index(self.rank), len(self.members)
