"""Who may take part in a meeting: the judgement of the server on the claim of a connection."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from hvdlite.common.connections.listener import Refusal
from hvdlite.common.connections.prove import Claim
from hvdlite.common.meeting import wire
from hvdlite.common.meeting.patience import spell_ranks


@dataclass(frozen=True)
class Admission:
    """Judges on claims to be one of `ranks` of `size` in the job `job`.

    `guests` are the ranks that are here already.
    """

    ranks: Sequence[int]
    size: int
    job: bytes
    guests: Container[int]

    def judge(self, proven: Claim) -> Refusal | None:
        """Return why the rank with this claim may not take part. Raises `ProtocolError`."""
        claim = wire.read_claim(proven.body)
        refusal = self._check(claim)
        return refusal and refusal._replace(sentence=f"rank {claim.rank} {refusal.sentence}")

    def _check(self, claim: wire.Claim) -> Refusal | None:
        if claim.job != self.job:
            return Refusal(wire.OTHER_JOB, "is of another job, or of another start of this one")
        if claim.size != self.size:
            return Refusal(wire.REFUSED, (
                f"counts {claim.size} ranks in the job, and the rank or launcher that serves the "
                f"meeting counts {self.size}"
            ))  # fmt: skip
        if claim.rank not in self.ranks:
            ranks = spell_ranks(self.ranks)
            return Refusal(wire.REFUSED, f"does not meet here: the ranks here are {ranks}")
        if claim.rank in self.guests:
            return Refusal(wire.DUPLICATE, "is here already: two processes have the same rank")
        return None
