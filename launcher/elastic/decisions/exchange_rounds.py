"""The rounds in which the members of a world tell each other where they are."""

from __future__ import annotations

from collections.abc import Sequence


class ExchangeRounds:
    """Collects one body of every member for each round."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = members
        self._rounds: dict[int, dict[int, bytes]] = {}

    def add(self, number: int, round_: int, body: bytes) -> list[bytes] | None:
        """Return the bodies of a round in rank order when this one was the last, else None."""
        bodies = self._rounds.setdefault(round_, {})
        bodies[number] = body
        if len(bodies) < len(self._members):
            return None
        del self._rounds[round_]
        return [bodies[member] for member in self._members]
