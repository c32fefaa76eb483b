"""Whether elastic jobs come out right, whatever is killed: the weights of an undisturbed run.

    python benchmarks/soak_elastic.py                        # 1,000 kills, then 2 x 5 minutes
    python benchmarks/soak_elastic.py --parts numbers --kills 100
    python benchmarks/soak_elastic.py --parts resnet50 gpt --seconds 60

* numbers: workers of numpy on 4 slots are killed at random times, while they start, meet, train and
  reset; a tenth of the kills hits two at once. One worker that holds a commit is always left.
* resnet50, gpt: the networks of the examples on 2 ranks; one rank is killed every 5 s.

Each worker notes the step and a digest of the weights with which each of its worlds begins. So the
sequence of worlds is known, and an undisturbed run of the same sequence in one process must have
the same weights, bit by bit, at each of these steps and at the end. Ranks compare their weights
after each reset, too. Nothing may be left behind; what launcher and agent hold must not grow.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import elastic_soak_worker
from elastic_jobs import ElasticJob, JobError, Note, elastic_job
from measuring import make_parser, parse, say, table, write

CHECK = {"HVDLITE_ELASTIC_CHECK": "1"}
RANKS = 4
TWICE = 0.1  # The share of kills that hit two workers.
FIRST_LOOK = 0.1  # The share of kills after which launcher and agent are looked at first.
PAGE = os.sysconf("SC_PAGE_SIZE")
Replay = Callable[[list[int], set[int]], Mapping[int, str]]


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Killer:
    """Kills workers of a job, so that one that holds a commit is always left."""

    def __init__(self, job: ElasticJob, seed: int) -> None:
        self.job, self.kills = job, 0
        self._lot = random.Random(seed)
        self._killed: set[int] = set()

    def _living(self, what: str) -> set[int]:
        pids = {note["pid"] for note in self.job.read() if note["what"] == what}
        return {pid for pid in pids - self._killed if is_alive(pid)}

    def kill_at_random(self, most_seconds: float) -> None:
        """Kill one or two after a random time, whatever they do."""
        time.sleep(self._lot.uniform(0, most_seconds))
        pids = sorted(self._living("started"))
        victims = self._lot.sample(pids, min(len(pids), 1 + (self._lot.random() < TWICE)))
        if self._living("began") - set(victims):
            for pid in victims:
                self._kill(pid)

    def kill_member(self, world: list[Note]) -> None:
        """Kill a rank of a world."""
        self._kill(self._lot.choice(world)["pid"])

    def has_killed(self, world: list[Note]) -> bool:
        """Return whether one of the ranks of a world was killed."""
        return any(note["pid"] in self._killed for note in world)

    def _kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._killed.add(pid)
            self.kills += 1


def launcher_holds(job: ElasticJob) -> dict[str, float]:
    """Return what the launcher and its agents hold together."""
    found = {"descriptors": 0.0, "tasks": 0.0, "resident_mib": 0.0}
    for process in launcher_processes(job.process.pid):
        folder = Path(f"/proc/{process}")
        found["descriptors"] += len(os.listdir(folder / "fd"))
        found["tasks"] += len(os.listdir(folder / "task"))
        found["resident_mib"] += int((folder / "statm").read_text().split()[1]) * PAGE / 2**20
    return found


def launcher_processes(pid: int) -> list[int]:
    """Return the launcher and its agents."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    agents = [
        int(child) for child in children
        if b"hvdlite.launcher.agent_process.agent" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # fmt: skip
    return [pid, *agents]


def compare(notes: list[Note], ranks: int, replay: Replay) -> dict[str, Any]:
    """Compare with an undisturbed run; return what was compared. Raises `JobError`."""
    began: dict[int, list[Note]] = {}
    for note in notes:
        if note["what"] == "began":
            began.setdefault(note["epoch"], []).append(note)
    done = [note for note in notes if note["what"] == "done"]
    if len(done) != ranks:
        raise JobError(f"{len(done)} of {ranks} workers have returned")
    sizes: list[int] = []
    for _, members in sorted(began.items()):
        first = members[0]
        for note in members:
            agree("step", note, first)
        # This world goes on from here. How far it comes, the next one tells, which cuts it off.
        sizes = [*lengthen(sizes, first["step"]), first["size"]]
    end = done[0]["step"]
    sizes = lengthen(sizes, end)
    checked = on_the_path(began, end) + done
    expected = replay(sizes, {note["step"] for note in checked})
    for note in checked:
        agree("digest", note, {**note, "digest": expected[note["step"]]})
    return {"worlds": len(began), "steps": end, "digests": len(checked),
            "sizes": {size: sizes.count(size) for size in sorted({*sizes})}}  # fmt: skip


def lengthen(sizes: list[int], steps: int) -> list[int]:
    """Return the sizes of so many steps; the last world has made those that are missing."""
    return (sizes + sizes[-1:] * steps)[:steps]


def on_the_path(began: Mapping[int, list[Note]], end: int) -> list[Note]:
    """Return what workers noted about steps that no later world has made again.

    A world may begin with a commit that one worker alone holds, and end with this worker.
    """
    kept: list[Note] = []
    for _, members in sorted(began.items(), reverse=True):
        end = min(end, members[0]["step"])
        kept += [note for note in members if note["step"] == end]
    return kept


def agree(key: str, note: Note, expected: Note) -> None:
    """Raise `JobError` where a worker has noted another value than was expected."""
    if note[key] != expected[key]:
        raise JobError(f"{key} {expected[key]} was expected: {note}")


def soak_numbers(args: argparse.Namespace) -> dict[str, Any]:
    """Kill workers at random times."""
    with elastic_job(["-np", str(RANKS), "--min-np", "1"], ["soak"], CHECK) as job:
        job.whole_world(RANKS)
        killer = Killer(job, args.seed)
        first: dict[str, float] = {}
        said = 0
        while killer.kills < args.kills:
            killer.kill_at_random(args.most_seconds)
            if not first and killer.kills >= args.kills * FIRST_LOOK:
                first = launcher_holds(job)
            if killer.kills >= said + 100:
                said = killer.kills
                say(f"{said} kills of {args.kills}, {count_worlds(job)} worlds")
            check_runs(job)
        return finish(job, killer, first, RANKS, elastic_soak_worker.replay)


def soak_network(network: str, args: argparse.Namespace) -> dict[str, Any]:
    """Kill one of two ranks every few seconds."""
    from elastic_training import replay

    words = ["learn", "--network", network]
    with elastic_job(["-np", "2", "--min-np", "1"], words, CHECK) as job:
        world = job.whole_world(2)
        killer = Killer(job, args.seed)
        first = launcher_holds(job)
        start = time.monotonic()
        while time.monotonic() < start + args.seconds:
            time.sleep(args.every - (time.monotonic() - start) % args.every)
            killer.kill_member(world)
            world = job.whole_world(2, world[0]["epoch"])
            check_runs(job)
        say(f"{network}: {killer.kills} kills, {count_worlds(job)} worlds")
        return finish(job, killer, first, 2, partial(replay, network))


def count_worlds(job: ElasticJob) -> int:
    return len({note["epoch"] for note in job.notes if note["what"] == "began"})


def check_runs(job: ElasticJob) -> None:
    """Raise `JobError` where the job has ended."""
    if job.process.poll() is not None:
        raise JobError(f"the job has ended:\n{job.log.read_text()[-6000:]}")


def finish(
    job: ElasticJob, killer: Killer, first: dict[str, float], ranks: int, replay: Replay
) -> dict[str, Any]:
    """Let a job end with all of its ranks, and compare."""
    epoch = max(note["epoch"] for note in job.read() if "epoch" in note) - 1
    # The last world may be whole only because nobody has noticed yet who was killed in it.
    while killer.has_killed(world := job.whole_world(ranks, epoch)):
        epoch = world[0]["epoch"]
    last = launcher_holds(job)
    job.end(60)
    holds = {name: [first[name], last[name]] for name in first}
    return {"kills": killer.kills, **compare(job.notes, ranks, replay), "launcher": holds}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "numbers": soak_numbers,
    "resnet50": partial(soak_network, "resnet50"),
    "gpt": partial(soak_network, "gpt"),
}


def parse_arguments() -> argparse.Namespace:
    parser = make_parser("Kill workers of elastic jobs, and compare weights.", "soak_elastic")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--kills", type=int, default=1000, help="of numbers")
    parser.add_argument("--most-seconds", type=float, default=0.6, help="between two of these")
    parser.add_argument("--seconds", type=float, default=300, help="of each network")
    parser.add_argument("--every", type=float, default=5, help="seconds between kills of networks")
    parser.add_argument("--seed", type=int, default=0)
    return parse(parser, "a few kills", kills=10, seconds=8, every=4)


def main() -> None:
    args = parse_arguments()
    records = []
    for part in args.parts:
        start = time.monotonic()
        found = PARTS[part](args)
        records.append({"part": part, "seconds": time.monotonic() - start, **found})
        say(f"{part}: {records[-1]['seconds']:.0f} s")
    names = ("kills", "worlds", "steps", "digests")
    rows = [
        [each["part"], *(str(each[name]) for name in names),
         *(f"{low:.0f} to {high:.0f}" for low, high in each["launcher"].values())]
        for each in records
    ]  # fmt: skip
    held = ["descriptors", "tasks", "MiB"]
    print("\nequal to an undisturbed run, bit by bit; nothing is left behind\n")
    print(table(["", *names[:-1], "compared", *(f"launcher's {name}" for name in held)], rows))
    write(args.json, records)


if __name__ == "__main__":
    main()
