"""The way from one world to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from hvdlite.launcher.elastic.decisions.check_agreement import CheckAgreement
from hvdlite.launcher.elastic.decisions.roster import Worker


@dataclass
class Reset:
    """A world is to be replaced, since the time `since`.

    It begins in one of two ways. Either hosts have changed, then all ranks agree on the check that
    raises in them; or a rank was lost, or has left the world, then the others are told to regroup.
    """

    since: float
    agreement: CheckAgreement | None = None
    kind: int = 0
    raised: bool = False  # All ranks know the check.
    interrupted: bool = False  # The first rank is there.
    regroup_at: float | None = None  # A rank has left the world; who was lost is not known yet.
    regrouped: bool = False
    left: set[int] = field(default_factory=set)  # The ranks that have left this very world.
    losses: list[Worker] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """All ranks know that their world is over."""
        return self.regrouped or self.raised
