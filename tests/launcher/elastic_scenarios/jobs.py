"""Runs the scripts of the scenarios to their end, and reads what their workers say."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launcher.jobs import launch

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
    def of(cls, done: subprocess.CompletedProcess[str]) -> Outcome:
        """Read what the workers of a job have said."""
        found = (MARKED.match(line) for line in done.stdout.splitlines())
        lines = sorted(
            (json.loads(match["line"]) for match in found if match), key=lambda line: line["time"]
        )
        return cls(done.returncode, lines, done.stdout, done.stderr)

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


def run(
    script: str,
    *flags: str,
    faults: Sequence[Fault] = (),
    timeout: float = 60,
    **variables: Any,
) -> Outcome:
    """Run a script of this folder under hvdlite-run; nothing of the job may be left."""
    module = f"tests.launcher.elastic_scenarios.{script}"
    texts = {name: str(value) for name, value in variables.items()}
    texts["FAULTS"], texts["HVDLITE_ELASTIC_CHECK"] = json.dumps(list(faults)), "1"
    texts["FIRST_WORKERS"] = flags[flags.index("-np") + 1]
    done = launch(
        *flags, "python", "-m", module,
        timeout=timeout, may_leave=OTHERS, **texts,
    )  # fmt: skip
    return Outcome.of(done)


def flags(size: int, hosts: int = 1) -> tuple[str, ...]:
    """Ask for a job of so many ranks on one host, or on two between which TCP is used."""
    spelled = f"localhost:{size}"
    if hosts == 2:
        spelled = f"localhost:{size - size // 2},127.0.0.1:{size // 2}"
    return ("-np", str(size), "--min-np", "1", "-H", spelled)


def discovery(folder: Path, *hosts: str) -> tuple[str, ...]:
    """Write a discovery script that shows these hosts at first; return its flags."""
    (folder / "hosts").write_text("".join(f"{host}\n" for host in hosts))
    script = folder / "hosts.sh"
    script.write_text(f"#!/bin/sh\ncat {folder / 'hosts'}\n")
    script.chmod(0o755)
    return ("--host-discovery-script", str(script))


def check_order(outcome: Outcome) -> None:
    """Old workers keep their order from world to world, and rank 0 is never a newcomer."""
    worlds = list(outcome.worlds().values())
    for old, new in itertools.pairwise(worlds):
        kept = [number for number in old if number in new]
        assert [number for number in new if number in old] == kept, worlds
        assert new[0] in old, worlds


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
    return first


def recovery_seconds(outcome: Outcome) -> float:
    """From the last fault to the end of the last first allreduce of the world after it."""
    fault = outcome.faults[-1]["time"]
    later = [line for line in outcome.lines if "reduced" in line and line["time"] > fault]
    epoch = min(line["reduced"] for line in later)
    return float(max(line["time"] for line in later if line["reduced"] == epoch) - fault)
