"""What came of a job of the scenarios, read from what its workers say."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Files that frameworks leave, also where they are killed; names of ours begin with "hvdlite".
OTHERS = "[!h]*"
Line = dict[str, Any]
Fault = dict[str, Any]
MARKED = re.compile(r"\[\d+\]<stdout>:(?P<line>\{.*\})$")


@dataclass(frozen=True)
class Outcome:
    """What came of a job."""

    code: int
    lines: list[Line]
    out: str
    err: str

    @classmethod
    def of(cls, code: int, out: Sequence[str], err: Sequence[str]) -> Outcome:
        """Read what the workers of a job have said."""
        found = (MARKED.match(line) for line in out)
        lines = sorted(
            (json.loads(match["line"]) for match in found if match), key=lambda line: line["time"]
        )
        return cls(code, lines, "\n".join(out), "\n".join(err))

    @property
    def results(self) -> list[Line]:
        """The results of the workers that have returned, in rank order."""
        return sorted(
            (line for line in self.lines if "result" in line), key=lambda line: int(line["rank"])
        )

    @property
    def faults(self) -> list[Line]:
        """The faults that have happened, in their order."""
        return [line for line in self.lines if "fault" in line]

    def worlds(self) -> dict[int, list[int]]:
        """The members of all worlds in which a worker has trained, by epoch."""
        found: dict[int, list[int]] = {}
        for line in self.lines:
            if "entered" in line:
                assert found.setdefault(line["entered"], line["members"]) == line["members"]
                assert line["members"][line["rank"]] == line["number"]
        return dict(sorted(found.items()))


def check_order(outcome: Outcome) -> None:
    """Old workers keep their order from world to world, and rank 0 is never a newcomer."""
    worlds = outcome.worlds()
    for (last, old), (epoch, new) in itertools.pairwise(worlds.items()):
        kept = [number for number in old if number in new]
        assert [number for number in new if number in old] == kept, worlds
        # Nobody trains in a world that loses a rank at once.
        assert epoch > last + 1 or new[0] in old, worlds


def check_nothing_is_kept(outcome: Outcome) -> None:
    """No worker has more threads or files open than in an earlier world of the same layout.

    Ranks share memory as they need it, so the ranks that receive the state count, too.
    """
    first: dict[str, Line] = {}
    for line in outcome.lines:
        if "held" in line:
            before = first.setdefault(json.dumps([line["number"], line["layout"]]), line)
            for then, now in zip(before["held"], line["held"], strict=True):
                assert now <= then, [before, line]


def check_weights(outcome: Outcome, steps: int) -> Line:
    """All that have returned agree; weights are those of the history; return one result."""
    assert outcome.code == 0, outcome.out + outcome.err
    results = outcome.results
    assert results, outcome.out + outcome.err
    assert [line["rank"] for line in results] == list(range(results[0]["size"]))
    first = results[0]
    for line in results:
        assert (line["history"], line["result"]) == (first["history"], first["result"])
    assert [step for step, _ in first["history"]] == list(range(steps))
    expected = sum(
        (number + 1) * (step + 1) for step, members in first["history"] for number in members
    )
    assert first["result"] == expected
    check_order(outcome)
    check_nothing_is_kept(outcome)
    return first


def recovery_seconds(outcome: Outcome) -> float:
    """From the last fault to the end of the last first allreduce of the world after it."""
    fault = outcome.faults[-1]["time"]
    later = [line for line in outcome.lines if "reduced" in line and line["time"] > fault]
    epoch = min(line["reduced"] for line in later)
    return float(max(line["time"] for line in later if line["reduced"] == epoch) - fault)
