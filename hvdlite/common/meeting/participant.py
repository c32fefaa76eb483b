"""A rank that takes part in a meeting at a server, as both of its exchanges are told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdlite.common.meeting.wire import JOB_BYTES


@dataclass(frozen=True)
class Participant:
    """World rank `rank` of a job of `size` ranks, which waits until `deadline` (monotonic seconds).

    `members` are the world ranks that meet, in the order of their new numbers; None is all of
    `size`. `secret` and `job` are those of the server. `served_by` says which rank serves, and
    which variable says where, in a few words; it is empty where another program serves.
    """

    rank: int
    size: int
    secret: bytes
    deadline: float
    members: Sequence[int] | None = None
    job: bytes = bytes(JOB_BYTES)
    served_by: str = ""

    @property
    def place(self) -> tuple[int, int]:
        """The number of this rank among those that meet, and how many they are."""
        if self.members is None:
            return self.rank, self.size
        return self.members.index(self.rank), len(self.members)

    def likely_cause(self, error: Exception) -> str:
        """Return a clause about why the server cannot be reached; empty where nothing is known."""
        if isinstance(error, ConnectionRefusedError) and self.served_by:
            return f": {self.served_by}, and has not started, or has not called init() yet"
        if isinstance(error, TimeoutError):
            return ": another program may own the port, or a firewall may be between"
        return ""
