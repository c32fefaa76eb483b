"""In which check all ranks of a world hear of a change of hosts."""

from __future__ import annotations

from collections.abc import Iterable


class CheckAgreement:
    """Finds the first check that no rank has passed yet.

    All ranks were told to hold in their next check and to say how many they have passed.
    """

    def __init__(self, counter: int, numbers: Iterable[int]) -> None:
        self.counter = counter
        self._missing = set(numbers)
        self._most_passed = 0

    def answer(self, number: int, counter: int, count: int) -> None:
        """Take the number of checks that a worker has passed; an answer of old is ignored."""
        if counter == self.counter and number in self._missing:
            self._missing.remove(number)
            self._most_passed = max(self._most_passed, count)

    def leave_out(self, number: int) -> None:
        """Do not wait for a worker that has returned."""
        self._missing.discard(number)

    @property
    def check(self) -> int | None:
        """The number of the check; None: not all have answered."""
        return None if self._missing else self._most_passed + 1
