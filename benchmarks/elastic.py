"""How fast elastic jobs recover and grow, and what being elastic costs.

    python benchmarks/elastic.py                            # 4 minutes
    python benchmarks/elastic.py --parts kill --ranks 8     # one part
    python benchmarks/elastic.py --quick                    # 30 seconds, 2 ranks

The parts:

* kill: kill -9 of each rank in turn, until the end of the survivors' first allreduce, the slowest
  of them; a new worker takes its place, and how long that interrupts the others; bytes sent.
* stop: SIGSTOP of a worker, until the same.
* cable: one of two and of three simulated hosts (they need root, iproute2, ssh and the extra test)
  loses its cables, until the same.
* commit: commits of ResNet-50 with momentum, beside a copy of the same bytes, and beside a step.
* steady: steps of the transformer in an elastic job and in a fixed one, in turns.
* resets: what a process holds after one reset after the other.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

from elastic_cost import measure_commits, measure_steady, print_commits, print_steady
from elastic_jobs import HERE, WORKER, ElasticJob, Note, elastic_job, of_world
from jobs import Record, environment
from measuring import Spread, duration, make_parser, parse, say, table, write

SETTLE_SECONDS = 0.2  # Between the first step of a world and the next kill.
STAGES = ("failed", "joined", "entered", "time")
STOP_RANKS = 4
MIB = 1 << 20
Rows = list[Record]


def recovery(job: ElasticJob, world: Sequence[Note], lost: Sequence[Note], start: float) -> Record:
    """Return seconds from `start` until the survivors of `world` had failed, joined, summed.

    Each figure is that of the slowest survivor.
    """
    gone = {note["number"] for note in lost}
    left = [note["number"] for note in world if note["number"] not in gone]
    epoch = world[0]["epoch"]
    began = job.wait(lambda notes: of_world(notes, "began", left, epoch), "the next world")
    stages = {stage: max(note[stage] for note in began) - start for stage in STAGES}
    more = {name: max(note[name] for note in began) for name in ("bytes", "collectives", "undone")}
    return {"seconds": stages.pop("time"), "stages": stages, **more}


def growth(world: Sequence[Note], old: Sequence[Note]) -> Record:
    """Return the longest interruption of an old rank by `world`: commit to first allreduce.

    `pause` is the longest time between two of its steps before, while the newcomer was starting.
    """
    numbers = {note["number"] for note in old}
    left = [note for note in world if note["number"] in numbers]
    waits = [note["time"] - note["left"] for note in left]
    pause = max(note["pause"] for note in left)
    return {"seconds": max(waits), "bytes": max(note["bytes"] for note in world), "pause": pause}


def measure_kills(args: argparse.Namespace) -> Rows:
    """Kill each rank of each size in turn."""
    records: Rows = []
    for ranks in args.ranks:
        with elastic_job(["-np", str(ranks), "--min-np", "1"], ["train"]) as job:
            world = job.whole_world(ranks)
            for kill in range(max(1, round(args.kills / ranks)) * ranks):
                time.sleep(SETTLE_SECONDS)
                victim = world[kill % ranks]
                start = time.monotonic()
                os.kill(victim["pid"], signal.SIGKILL)
                found = recovery(job, world, [victim], start)
                case = {"ranks": ranks, "rank": victim["rank"]}
                records.append({"part": "kill", **case, **found})
                old, world = world, job.whole_world(ranks, world[0]["epoch"])
                records.append({"part": "growth", **case, **growth(world, old)})
            job.end()
        say(f"{ranks} ranks: {len(records)} figures")
    return records


def measure_stops(args: argparse.Namespace) -> Rows:
    """Stop a worker, as SIGSTOP or a debugger does."""
    records: Rows = []
    ranks = min(STOP_RANKS, max(args.ranks))
    for rank in range(min(args.rounds, ranks)):
        with elastic_job(["-np", str(ranks), "--min-np", "1"], ["train"]) as job:
            world = job.whole_world(ranks)
            time.sleep(SETTLE_SECONDS)
            victim = world[rank]
            start = time.monotonic()
            os.kill(victim["pid"], signal.SIGSTOP)
            found = recovery(job, world, [victim], start)
            with suppress(ProcessLookupError):  # It is killed soon.
                os.kill(victim["pid"], signal.SIGCONT)
            records.append({"part": "stop", "ranks": ranks, "rank": rank, **found})
            job.whole_world(ranks, world[0]["epoch"])
            job.end()
    return records


@contextmanager
def lab_job(lab: Any, hosts: Sequence[str]) -> Iterator[ElasticJob]:
    """Start a job with two workers on each of these hosts; its launcher is on the first one."""
    from tests.hosts.lab import SHARED

    notes = Path(lab.folder) / "shared" / "notes"
    notes.mkdir()
    log = notes / "log"
    try:
        spelled = ",".join(f"{host}:2" for host in hosts)
        flags = ["-np", str(2 * len(hosts)), "--min-np", "1", "-H", spelled]
        launcher = ["python", "-m", "hvdlite.launcher", *flags]
        program = ["python", str(WORKER), str(SHARED / "notes"), "train"]
        into = ["sh", "-c", f'exec "$@" >{SHARED}/notes/log 2>&1', "sh"]
        here = {"PYTHONPATH": str(HERE.parent), "OMP_NUM_THREADS": "1"}
        log.touch()
        with lab.start(hosts[0], *into, *launcher, *program, **here) as running:
            yield ElasticJob(notes, running.process, log)
    finally:
        lab.clear()
        for path in (*notes.iterdir(),):
            path.unlink()
        notes.rmdir()


def measure_cables(args: argparse.Namespace) -> Rows:
    """Cut the cables of the last host."""
    sys.path.append(str(HERE.parent))
    from tests.hosts.build import build
    from tests.hosts.faults import cut
    from tests.hosts.lab import HOSTS, CannotBuildError

    records: Rows = []
    with ExitStack() as stack:
        try:
            lab = build()
        except CannotBuildError as why:
            say(f"left out: cable: {why}")
            return []
        stack.callback(lab.close)
        for count in (2, 3):
            hosts = HOSTS[:count]
            for _ in range(args.rounds):
                with lab_job(lab, hosts) as job:
                    world = job.whole_world(2 * count)
                    time.sleep(SETTLE_SECONDS)
                    start = time.monotonic()
                    with cut(lab, hosts[-1]):
                        found = recovery(job, world, world[-2:], start)
                records.append({"part": "cable", "ranks": 2 * count, "hosts": count, **found})
            say(f"cables of {count} hosts")
    return records


def measure_resets(args: argparse.Namespace) -> Rows:
    """Fail in each world of two ranks, again and again."""
    start = time.monotonic()
    with elastic_job(["-np", "2", "--min-np", "2"], ["resets", "--count", str(args.resets)]) as job:
        job.end(args.resets * 0.3 + 30)
        seconds = (time.monotonic() - start) / args.resets
        looks = [note for note in job.read() if note["what"] == "look" and note["rank"] == 0]
    names = ("resets", "descriptors", "threads", "tasks", "resident_bytes")
    return [
        {"part": "resets", "seconds": seconds, **{name: note[name] for name in names}}
        for note in looks
    ]


PARTS: dict[str, Callable[[argparse.Namespace], Rows]] = {
    "kill": measure_kills,
    "stop": measure_stops,
    "cable": measure_cables,
    "commit": measure_commits,
    "steady": measure_steady,
    "resets": measure_resets,
}


def summarize(records: Rows) -> Rows:
    """Merge the figures of equal cases of kills, growth, stops and cables; keep all others."""
    keys = ("part", "ranks", "rank", "hosts")
    cases: dict[tuple[Any, ...], Rows] = {}
    kept: Rows = []
    for record in records:
        if record["part"] in ("kill", "growth", "stop", "cable"):
            cases.setdefault(tuple(record.get(key) for key in keys), []).append(record)
        else:
            seconds = record["seconds"]
            spread = seconds if isinstance(seconds, dict) else vars(Spread.extremes([seconds]))
            kept.append({**record, "seconds": spread})
    merged = []
    for group in cases.values():
        case = {key: group[0][key] for key in keys if key in group[0]}
        figures: Record = {"seconds": vars(Spread.extremes([each["seconds"] for each in group]))}
        figures["bytes"] = max(each.get("bytes", 0) for each in group)
        figures |= {
            name: max(each[name] for each in group)
            for name in ("undone", "pause")
            if name in group[0]
        }
        figures["all"] = [each["seconds"] for each in group]
        if "stages" in group[0]:
            stages = {s: median(each["stages"][s] for each in group) for s in STAGES[:-1]}
            figures |= {"stages": stages, "collectives": max(e["collectives"] for e in group)}
        merged.append({**case, **figures})
    return merged + kept


def print_tables(records: Rows) -> None:
    """Print one table for each part that was measured."""
    print_losses(records)
    commits = [each for each in records if each["part"] == "commit"]
    if commits:
        print_commits(commits)
    print_steady(records)
    resets = [each for each in records if each["part"] == "resets"]
    if resets:
        print(f"\na reset takes {duration(resets[0]['seconds']['median'])}:\n")
        rows = [
            [*(str(each[n]) for n in ("resets", "descriptors", "threads", "tasks")),
             f"{each['resident_bytes'] / MIB:.1f} MiB"]
            for each in resets
        ]  # fmt: skip
        print(table(["resets", "descriptors", "Python threads", "tasks", "resident"], rows))


def print_losses(records: Rows) -> None:
    """Print what a loss and its replacement cost."""
    rows = []
    for each in records:
        if each["part"] not in ("kill", "growth", "stop", "cable"):
            continue
        what = f"rank {each['rank']}" if "rank" in each else f"1 of {each['hosts']} hosts"
        stages = (
            [duration(each["stages"][s]) for s in STAGES[:-1]] if "stages" in each else [""] * 3
        )
        seconds = str(Spread(**each["seconds"]))
        undone = str(each.get("undone", ""))
        pause = duration(each["pause"]) if "pause" in each else ""
        rows.append(
            [each["part"], str(each["ranks"]), what, seconds, *stages, f"{each['bytes']}", undone,
             pause]
        )  # fmt: skip
    if rows:
        head = ["", "ranks", "lost", "first allreduce", "noticed", "joined", "synced", "bytes sent",
                "commits undone", "longest pause before"]  # fmt: skip
        print()
        print(table(head, rows))


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("How elastic jobs recover, and what they cost.", "elastic", [2, 4, 8])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--kills", type=int, default=8, help="of each size, about")
    parser.add_argument("--rounds", type=int, default=3, help="jobs of stop, cable and steady")
    parser.add_argument("--network", default="resnet50", help="of commit, as in training.py")
    parser.add_argument("--steps", type=int, default=20, help="of commit")
    parser.add_argument("--turns", type=int, default=100, help="of each job of steady")
    parser.add_argument("--turn-steps", type=int, default=3)
    parser.add_argument("--resets", type=int, default=1000)
    return parse(
        parser, "2 ranks, few figures, without hosts", ranks=[2], kills=2, rounds=1, steps=4,
        turns=3, turn_steps=3, resets=20, network="gpt",
        parts=[part for part in PARTS if part != "cable"],
    )  # fmt: skip


def main() -> None:
    args = parse_arguments()
    os.environ.update(environment())
    found: Rows = []
    for part in args.parts:
        start = time.monotonic()
        found += PARTS[part](args)
        say(f"{part}: {time.monotonic() - start:.0f} s")
    records = summarize(found)
    print_tables(records)
    write(args.json, records)


if __name__ == "__main__":
    main()
