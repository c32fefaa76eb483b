"""Who may take part in a meeting: the judgement of the server on the claim of a connection."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hvdlite.common.meeting import handshake, wire
from hvdlite.common.meeting.patience import spell_ranks
from hvdlite.common.plain.messages import PROTOCOL_VERSION

SECRETS_DIFFER = "has another secret: HVDLITE_SECRET must be the same for all ranks of a job"


class Judgement(NamedTuple):
    """What the server thinks of a claim."""

    rank: int  # -1 for a connection that is refused.
    answer: bytes
    note: str = ""  # What those who wait for the rank have to know.
    # The rank that has another protocol, and its version.
    other_version: tuple[int, str] | None = None


@dataclass(frozen=True)
class Admission:
    """Judges on claims to be one of `ranks` of `size` in the job `job`, which has `secret`.

    `guests` are the ranks that are here already.
    """

    ranks: Sequence[int]
    size: int
    secret: bytes
    job: bytes
    guests: Container[int]

    def judge(self, raw: bytes, nonce: bytes, peer_name: str) -> Judgement:
        """Return the judgement on a claim with its proof; `nonce` is that of the server."""
        said, given = raw[: wire.CLAIM.size], raw[wire.CLAIM.size :]
        claim = wire.unpack_claim(said)
        nonces = nonce + claim.nonce
        who = f"rank {claim.rank}"
        if handshake.proves(given, self.secret, handshake.CONNECTS, nonces, said):
            reply, reason = self._check(claim)
        else:
            who = f"a process at {peer_name}"
            reply, reason = wire.OTHER_SECRET, SECRETS_DIFFER
        if reply == wire.ACCEPTED:
            return Judgement(claim.rank, wire.pack_acceptance(self.secret, nonces, said))
        sentence = f"{who} {reason}"
        passes = reply in (wire.OTHER_JOB, wire.DUPLICATE)
        other_version = (claim.rank, claim.spell()) if reply == wire.OTHER_VERSION else None
        note = "" if passes else sentence
        return Judgement(-1, wire.pack_refusal(reply, sentence), note, other_version)

    def _check(self, claim: wire.Claim) -> tuple[int, str]:
        """Return the reply to a rank that has the secret, and the reason of a refusal."""
        if claim.protocol != PROTOCOL_VERSION:
            return wire.OTHER_VERSION, (
                f"runs hvdlite {claim.version} (protocol {claim.protocol}), "
                f"and this job has protocol {PROTOCOL_VERSION}"
            )
        if claim.job != self.job:
            return wire.OTHER_JOB, "is of another job, or of another start of this one"
        if claim.size != self.size:
            return wire.REFUSED, (
                f"counts {claim.size} ranks in the job, and the rank or launcher that serves the "
                f"meeting counts {self.size}"
            )
        if claim.rank not in self.ranks:
            ranks = spell_ranks(self.ranks)
            return wire.REFUSED, f"does not meet here: the ranks here are {ranks}"
        if claim.rank in self.guests:
            return wire.DUPLICATE, "is here already: two processes have the same rank"
        return wire.ACCEPTED, ""
