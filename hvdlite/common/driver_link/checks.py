"""The agreement of all ranks of a world on the check at which they are interrupted.

[Note: agreement on a check]
Every rank calls `State.check_host_updates` at the same points of its script, so the n-th check of
one rank is the n-th of all. When another world is wanted, the driver sends a notice. From then on a
rank that comes to a check waits in it, and its link thread, which never waits for the script, tells
how many checks the rank has passed. The interrupt is raised in the check after the largest of these
counts: no rank has passed it, and none passes it any more. Ranks that are behind go on until there,
and find all others, so collectives between two checks are complete on all ranks. Nobody waits for
a rank, only for the driver, so the agreement cannot end in a deadlock.
"""

from __future__ import annotations


class Checks:
    """The checks of one rank in one world. Whoever uses it from several threads needs a lock."""

    def __init__(self) -> None:
        self.passed = 0
        # The counter of a notice that has not been followed by its decision yet; 0: none.
        self.held = 0
        # The check that is interrupted, with the kind of the change; 0: none is.
        self.due, self.kind = 0, 0

    def hold(self, counter: int) -> None:
        """Let no check pass from now on, until the decision."""
        self.held = max(self.held, counter)

    def decide(self, counter: int, check: int, kind: int) -> None:
        """Interrupt the check number `check`; a notice after `counter` is not decided by this."""
        if counter >= self.held:
            self.held, self.due, self.kind = 0, check, kind

    def enter(self) -> int | None:
        """Count a check that may pass; return the kind of the change if it is interrupted."""
        self.passed += 1
        if self.passed != self.due:
            return None
        self.due = 0
        return self.kind
