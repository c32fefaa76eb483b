"""What being elastic costs while nothing happens: commits, and steps beside those of a fixed job.

Steps are measured in two ways. Two jobs, an elastic and a fixed one over the same transport, make
short turns in the order A B B A; each turn is compared with its neighbour, so that what disturbs
the machine for longer than a turn disturbs both. And what an elastic job does more is measured:
the time of each check in its step, the CPU time of the thread that is connected with the driver,
and that of launcher and agent beside that of a fixed job.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from statistics import median

import numpy as np
from elastic_jobs import ElasticJob, Note, elastic_job
from jobs import Record
from measuring import Spread, duration, say, table

Rows = list[Record]
KINDS = {"fixed": ["-np", "2"], "elastic": ["-np", "2", "--min-np", "1"]}
RANKS = 2
RESAMPLES = 10_000
MIB = 1 << 20


def measure_commits(args: argparse.Namespace) -> Rows:
    """Commit ResNet-50 after each of some steps, on two ranks."""
    words = ["commit", "--network", args.network, "--count", str(args.steps)]
    with elastic_job(["-np", "2", "--min-np", "1"], words) as job:
        job.end(300)
        notes = [note for note in job.read() if note["what"] == "commit" and note["rank"] == 0]
    return [{"part": "commit", "network": args.network, **note["found"]} for note in notes]


def measure_steady(args: argparse.Namespace) -> Rows:
    """Make steps of the transformer in an elastic and in a fixed job, in turns."""
    words = ["steady", "--count", str(args.turn_steps)]
    turns: dict[str, list[Note]] = {name: [] for name in KINDS}
    control: dict[str, list[float]] = {name: [] for name in KINDS}
    notes: list[list[Note]] = []
    for number in range(args.rounds):
        with ExitStack() as stack:
            jobs = {
                name: stack.enter_context(elastic_job(flags, words, {"HVDLITE_TRANSPORT": "tcp"}))
                for name, flags in KINDS.items()
            }
            for job in jobs.values():  # The first turn warms up.
                take_turn(job, 1)
            say(f"round {number + 1} of {args.rounds}")
            before = {name: control_seconds(job) for name, job in jobs.items()}
            start = time.monotonic()
            for turn in range(2, args.turns + 2):
                for name in sorted(KINDS, reverse=turn % 2 == 0):
                    turns[name].append(take_turn(jobs[name], turn))
            seconds = time.monotonic() - start
            for name, job in jobs.items():
                control[name].append((control_seconds(job) - before[name]) / seconds)
            for job in jobs.values():
                job.end()
        notes.append(jobs["elastic"].notes)
    return records_of(turns, notes, control)


def records_of(
    turns: dict[str, list[Note]], notes: Sequence[Sequence[Note]], control: dict[str, list[float]]
) -> Rows:
    """Return the figures of all turns; `notes` are those of the elastic jobs."""
    pairs = list(zip(turns["elastic"], turns["fixed"], strict=True))
    ratios = {
        figure: estimate([left[figure] / right[figure] for left, right in pairs])
        for figure in ("seconds", "cpu")
    }
    shares = {
        "checks": median(note["checks"] / note["seconds"] for note in turns["elastic"]),
        "link": max(share for each in notes for share in link_shares(each)),
        "control": median(control["elastic"]) - median(control["fixed"]),
    }
    case = {"part": "steady", "turns": len(pairs), "ratios": ratios, "shares": shares}
    records = [
        {**case, "entry": name, "seconds": vars(Spread.quartiles([n["seconds"] for n in found]))}
        for name, found in turns.items()
    ]
    checked = [note for each in notes for note in each if note["what"] == "checked"]
    check = vars(Spread.extremes([note["check"] for note in checked]))
    sent = max(note["sent"] for note in checked)
    return [*records, {"part": "check", "seconds": check, "sent": sent}]


def take_turn(job: ElasticJob, turn: int) -> Note:
    """Let a job make the steps of one turn; return its figures for a step of the slowest rank."""
    (job.folder / f"turn{turn}").touch()

    def of_turn(notes: list[Note]) -> list[Note]:
        found = [note for note in notes if note["what"] == "turn" and note["turn"] == turn]
        return found if len(found) == RANKS else []

    done: list[Note] = job.wait(of_turn, f"turn {turn}")
    return {name: max(note[name] for note in done) for name in ("seconds", "cpu", "checks")}


def link_shares(notes: Sequence[Note]) -> list[float]:
    """Return for each rank how much CPU time the thread of its connection needs in a second."""
    shares = []
    for rank in range(RANKS):
        own = [note for note in notes if note["what"] == "turn" and note["rank"] == rank]
        shares.append((own[-1]["link"] - own[0]["link"]) / (own[-1]["time"] - own[0]["time"]))
    return shares


def control_seconds(job: ElasticJob) -> float:
    """Return the CPU time so far of the launcher of a job and of its agent."""
    launcher = job.process.pid
    return sum(cpu_seconds(pid) for pid in (launcher, *children(launcher)))


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # The thread has ended.
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def cpu_seconds(pid: int) -> float:
    """Return the CPU time so far of all threads of a process that live."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def estimate(ratios: Sequence[float]) -> dict[str, float]:
    """Return the median of ratios, with an interval that holds the true one in 95 of 100 cases.

    The interval is that of the bootstrap: of medians of as many values, drawn with replacement.
    """
    values = np.asarray(ratios)
    drawn = np.random.default_rng(0).choice(values, (RESAMPLES, len(values)))
    low, high = np.quantile(np.median(drawn, axis=1), [0.025, 0.975])
    return {"low": float(low), "median": float(np.median(values)), "high": float(high)}


def print_commits(commits: Rows) -> None:
    rows = [
        [each["commit"], str(Spread(**each["seconds"])), duration(each["plain_copy"]),
         f"{each['seconds']['median'] / each['plain_copy']:.2f}", duration(each["step"]),
         f"{each['seconds']['median'] / each['step']:.2%}", f"{each['bytes'] / MIB:.0f} MiB"]
        for each in commits
    ]  # fmt: skip
    print("\ncommit() on 2 ranks at once:\n")
    head = ["", "commit", "plain copy", "to it", "a step", "share of it", "state"]
    print(table(head, rows))


def print_steady(records: Rows) -> None:
    """Print the steps of both jobs, their ratios, and what is measured by itself."""
    steady = {each["entry"]: each for each in records if each["part"] == "steady"}
    if steady:
        rows = [[name, str(Spread(**each["seconds"]))] for name, each in steady.items()]
        print("\na step in turns:\n")
        print(table(["job", "step (quartiles)"], rows))
        any_of = steady["elastic"]
        print(f"\nelastic / fixed in {any_of['turns']} pairs of turns, with 95 % intervals:")
        for figure, name in (("seconds", "time of a step"), ("cpu", "CPU time of a rank")):
            ratio = any_of["ratios"][figure]
            print(f"  {name}: {ratio['median']:.4f} ({ratio['low']:.4f} to {ratio['high']:.4f})")
        print("measured by itself, as a share of the time:")
        for figure, name in PARTS.items():
            print(f"  {name}: {any_of['shares'][figure]:.5%}")
    for each in records:
        if each["part"] == "check":
            print(
                f"check_host_updates() without news: {Spread(**each['seconds'])}, "
                f"messages: {each['sent']}"
            )


PARTS = {
    "checks": "the checks",
    "link": "CPU time of the thread of the driver's connection",
    "control": "CPU time of launcher and agent, more than those of the fixed job",
}
