"""Schedules: which member sends which blocks to whom, round by round. Data only.

Every tensor is cut into as many nearly equal blocks as a schedule has; which block an element is in
depends on its place in its own tensor alone. A member holds the blocks in an order of its own,
`Schedule.layout`, in which all that goes in one message lies side by side. In each round it first
sends, and then receives, in the order of the moves. A partial sum that comes is added to its own;
a block that is finished replaces it. Both ends of a message name the same blocks in the same order.

The members are numbered by their place, host by host: neighbours in number are near each other.
This module never sends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Move(NamedTuple):
    """One message, as one of its two ends sees it."""

    peer: int  # the member at the other end
    start: int  # the blocks at the places [start, stop) of the layout
    stop: int
    partial: bool  # whether they are partial sums, which the receiver adds
    # Whether both ends send their sums and go on with the total: both add in the order of their
    # numbers, and what both have sent, so that they have the same bits.
    mutual: bool = False


class Round(NamedTuple):
    """What a member does in one round."""

    sends: tuple[Move, ...] = ()
    receives: tuple[Move, ...] = ()
    finished: tuple[tuple[int, int], ...] = ()  # places whose sums are complete after the receives


@dataclass(frozen=True)
class Schedule:
    """The rounds of one member; all members have the same number of them."""

    layout: tuple[int, ...]  # the blocks, in the order in which this member holds them
    rounds: tuple[Round, ...]
    widest: int  # blocks of the longest message of any member

    @cached_property
    def reduces(self) -> bool:
        """Whether anything is added; else blocks are gathered."""
        return any(move.partial for each in self.rounds for move in each.sends)

    @cached_property
    def peers(self) -> frozenset[int]:
        """The members that this one talks to: each is a connection."""
        moves = (move for each in self.rounds for move in (*each.sends, *each.receives))
        return frozenset(move.peer for move in moves)


Scheduler = Callable[[int, int], Schedule]  # It takes the number of members, and a member.
