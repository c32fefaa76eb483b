"""The messages between a worker of an elastic job and its driver.

A worker is a process with a number that is never used twice in a job. A world is an epoch, which is
a number that grows, and workers in rank order. A connection begins with the proofs of prove.py, in
which the worker claims its number. Then come messages over a link, beats of the worker among them:

| worker -> driver | |
|---|---|
| HELLO pid | The first frame: the worker is in `init` and waits for a world. Counts as READY 0 0, unless it is answered by NEWCOMER. |
| READY epoch commit | The worker wants the next world. `epoch` is that of the last world that was given to it (0: none), `commit` the number of the commit that it holds (0: none). |
| GATHER epoch round body | One round of the exchange by which the ranks of the world meet; rounds are numbered from 0. |
| CHECKS counter count | The answer to NOTICE: how many checks of its world the worker has passed. |
| LATE epoch numbers | These members of the world `epoch` have not submitted what the others wait for, within the shutdown time of the stall inspector. |
| ERROR epoch text | The worker leaves the world `epoch` by an error of its script, as no rank was lost: READY follows. |
| BYE | The last frame of a worker whose script is done with the job. Its process may go on. |

| driver -> worker | |
|---|---|
| NEWCOMER rank members | The answer to HELLO while a world runs that does not wait for the worker. It says READY later. Rank and members (see WORLD) are the expected ones. |
| WORLD epoch members root behind commit | The next world; see `World`. All members are told the same: the rank of one is the place of its number. |
| BODIES epoch round bodies | The bodies of a round in rank order. |
| REGROUP epoch sentence rank | The world is over, because of `rank` (or nil). |
| SEEN counter kind | The hosts have changed; for scripts that look at it. |
| NOTICE counter kind | Another world is wanted: checks wait from now on until RAISE comes. |
| RAISE counter check kind | The interrupt is raised in check number `check` of the world (1 is the first): the largest count of all CHECKS, plus 1. |
| END code sentence | The worker ends with `code`: it is not needed any more, or the job has ended. |

This module never sends.
"""  # noqa: E501 - tables

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hvdlite.common.base.errors import ProtocolError

HELLO, READY, GATHER, CHECKS = "hello", "ready", "gather", "checks"
NEWCOMER, WORLD, BODIES, REGROUP = "newcomer", "world", "bodies", "regroup"
SEEN, NOTICE, RAISE, END = "seen", "notice", "raise", "end"
LATE, ERROR, BYE = "late", "error", "bye"

DRIVER, WORKER = "elastic driver", "elastic worker"  # The ends of a connection.
BEAT_SECONDS = 1.0

Member = tuple[int, str]  # The number of a worker, and the discovery name of its host.


class World(NamedTuple):
    """One world, as one of its members sees it."""

    epoch: int
    rank: int
    members: tuple[Member, ...]  # In rank order.
    root: int  # The rank whose state the ranks `behind` receive.
    behind: tuple[int, ...]  # Empty: nothing is sent.
    commit: int  # The number of the commit of `root`.

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def host(self) -> str:
        """The discovery name of this rank's host."""
        return self.members[self.rank][1]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of the workers, in rank order."""
        return tuple(number for number, _ in self.members)


def world_frame(
    epoch: int, members: Iterable[Member], root: int, behind: Iterable[int], commit: int
) -> list[Any]:
    """Return the frame that tells the members of a world what `World` has."""
    return [WORLD, epoch, [[*member] for member in members], root, [*behind], commit]


class Newcomer(NamedTuple):
    """The place that a worker will probably have in the world that takes it in."""

    rank: int
    members: tuple[Member, ...]


def claim(number: int) -> bytes:
    """Return what worker `number` claims when it connects."""
    return str(number).encode()


def read_claim(body: bytes) -> int:
    """Return the number in a claim. Raises `ProtocolError`."""
    if not body.isdigit():
        raise ProtocolError(f"it claims {body!r}")
    return int(body)


def read_world(message: Sequence[Any], number: int) -> World:
    """Return the world of a WORLD message, as worker `number` sees it. Raises `ProtocolError`."""
    match message:
        case [_, int(epoch), [*raw], int(root), [*behind], int(commit)]:
            members = read_members(raw)
            ranks = range(len(members))
            rank = next((rank for rank in ranks if members[rank][0] == number), None)
            if rank is not None and root in ranks and all(each in ranks for each in behind):
                return World(epoch, rank, members, root, tuple(behind), commit)
    raise _unreadable(message)


def read_newcomer(message: Sequence[Any]) -> Newcomer:
    """Return the place of a NEWCOMER message. Raises `ProtocolError`."""
    match message:
        case [_, int(rank), [*raw]] if 0 <= rank < len(raw):
            return Newcomer(rank, read_members(raw))
    raise _unreadable(message)


def read_members(raw: Iterable[Any]) -> tuple[Member, ...]:
    """Return the members of a message. Raises `ProtocolError`."""
    members = []
    for each in raw:
        match each:
            case [int(number), str(host)]:
                members.append((number, host))
            case _:
                raise _unreadable(each)
    return tuple(members)


def is_from_worker(message: Sequence[Any]) -> bool:
    match message:
        case [kind, int()]:
            kinds: tuple[str, ...] = (HELLO,)
        case [kind, int(), int()]:
            kinds = READY, CHECKS
        case [kind, int(), str()]:
            kinds = (ERROR,)
        case [kind, int(), int(), bytes()]:
            kinds = (GATHER,)
        case [kind, int(), [*numbers]] if all(isinstance(number, int) for number in numbers):
            kinds = (LATE,)
        case [kind]:
            kinds = (BYE,)
        case _:
            return False
    return kind in kinds


def _unreadable(message: object) -> ProtocolError:
    return ProtocolError(f"the driver of the job sent what cannot be read: {str(message)[:80]}")
