"""Random starts: who comes when, who comes that should not, and what happens meanwhile."""

from __future__ import annotations

import random
from dataclasses import dataclass

SERVER = -1  # As a rank: who serves the meeting, a launcher or rank 0.
STRANGERS = ("garbage", "silent", "half", "replay", "secret", "other job", "size", "flood")
IMPOSTORS = ("double", "server")  # With these a start may fail.
SHORT_SECONDS, LONG_SECONDS = 0.5, 30.0


@dataclass(frozen=True)
class Visitor:
    """Somebody who comes that is no rank of the job, and what he does there.

    | kind | what |
    |---|---|
    | garbage, silent, half, replay | says something else, nothing, half a claim, that of another |
    | claim | says to be somebody, without the secret |
    | secret, other job, size | a rank with another secret, of another start, or of a larger job |
    | flood | comes so often that others have no room |
    | double | a second process of the rank `which` |
    | server | listens where the ranks meet, before these do, and knows no secret |
    """

    at: float
    kind: str
    which: int = 0  # Of those that listen, or the rank that it says to be.
    seconds: float = 0.0


@dataclass(frozen=True)
class Hitch:
    """What befalls a rank that starts.

    | kind | what |
    |---|---|
    | kill, lose | the rank is killed, or its host is lost, which nobody tells the other hosts |
    | cut | all that it has open with `other` ends |
    | stop, stall | it is stopped, or what it sends to the host of `other` is held up, for a while |

    One that comes with what is `sends`-th of all that is sent cuts that connection, or kills who
    has sent it.
    """

    at: float
    kind: str
    rank: int
    other: int = SERVER
    seconds: float = 0.0
    sends: int = 0


@dataclass(frozen=True)
class Start:
    """How a job starts, before its ranks do anything."""

    late: tuple[float, ...]  # When each rank comes, in seconds.
    served: bool = False  # By a launcher; otherwise by rank 0.
    limit_seconds: float = LONG_SECONDS
    window: int = 1 << 16
    visitors: tuple[Visitor, ...] = ()
    hitches: tuple[Hitch, ...] = ()

    @property
    def may_fail(self) -> bool:
        """Whether something happens that ranks need not survive."""
        patience = self.limit_seconds / 2
        return (
            max(self.late) > patience
            or any(each.kind in IMPOSTORS for each in self.visitors)
            or any(
                not each.sends
                and (each.kind in ("kill", "lose", "cut") or each.seconds > SHORT_SECONDS)
                for each in self.hitches
            )
        )


def make_start(lot: random.Random, size: int) -> Start:
    """Draw how a job of so many ranks starts."""
    limit = lot.choice((3.0, LONG_SECONDS))
    late = tuple(lot.choice((0.0, 0.0, 0.01, 0.3)) * lot.random() for _ in range(size))
    if lot.random() < 0.1:
        late = (*late[:-1], lot.choice((1.0, 2.0)) * limit * lot.random())
    visitors: list[Visitor] = []
    if lot.random() < 0.6:
        for _ in range(lot.randint(1, 3)):
            kind = lot.choice(STRANGERS if lot.random() < 0.9 else IMPOSTORS)
            if kind == "double" and any(each.kind == kind for each in visitors):
                kind = "silent"  # With one of each rank, there would be two jobs that can meet.
            at = 0.0 if kind == "server" else lot.choice((0.0, 0.02, 0.4)) * lot.random()
            visitors.append(Visitor(at, kind, lot.randrange(8), lot.choice((0.01, 1.0, 8.0))))
    hitches: list[Hitch] = []
    if lot.random() < 0.4:
        for _ in range(lot.choice((1, 1, 2))):
            kind = lot.choice(("kill", "lose", "cut", "cut", "stop", "stall"))
            rank, other = lot.randrange(size), lot.randrange(-1, size)
            seconds = lot.choice((0.01, 0.4, 0.4, limit)) * lot.random()
            at = lot.choice((0.005, 0.02, 0.4)) * lot.random()
            if lot.random() < 0.6:
                kind = lot.choice(("cut", "cut", "kill"))
                hitches.append(Hitch(0.0, kind, 0, sends=lot.randint(1, 15 * size)))
                continue
            hitches.append(Hitch(at, kind, rank, other, seconds))
    return Start(
        late,
        served=lot.random() < 0.5,
        limit_seconds=limit,
        window=lot.choice((2048, 1 << 16)),
        visitors=tuple(visitors),
        hitches=tuple(hitches),
    )
