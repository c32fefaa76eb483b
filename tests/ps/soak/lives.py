"""What happens to the processes of a soak's job, and what their values must be at its end."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from tests.ps.digits import train_in_one
from tests.ps.processes import Cluster, cluster
from tests.ps.sites import Site
from tests.ps.soak.members import PHASES, main, put
from tests.ps.soak.training import (
    LENGTH,
    LIFE_STEPS,
    ROWS,
    SIZES,
    Array,
    Plan,
    flat,
    gradients_of,
    rows_of,
)

KINDS = [
    *["kill"] * 6, *["stop"] * 2, *["server joins"] * 2, *["servers leave"] * 2,
    "worker joins", "worker leaves", "full disk",
]  # fmt: skip
MOST_SERVERS, MOST_VISITORS = 4, 2
LIVES = 2


class Life:
    """One cluster of a job, and what is done to it."""

    def __init__(
        self, job: Cluster, life: int, servers: int, plan: Plan, dice: random.Random
    ) -> None:
        self._job, self._life, self._dice, self._plan = job, life, dice, plan
        self._first, self._phase = servers, 0
        self._visitors = [*range(plan.workers, plan.workers + 100)]  # Numbers not given yet.
        self._phase_of: dict[str, int] = {}
        self.events: Counter[str] = Counter()

    def run(self, events: int) -> None:
        """Let so many things happen; then wait for the end."""
        for number in range(self._plan.workers):
            self._job.wait_for_file(f"begun-{self._life}-{number}")
        counts = Counter(self._dice.randrange(PHASES) for _ in range(events))
        for self._phase in range(PHASES):
            for _ in range(counts[self._phase]):
                self._let_happen(self._dice.choice(KINDS))
            self._end_phase()
        self._job.wait_until(lambda: not self._here("scheduler", "server", "worker"))

    def _let_happen(self, kind: str) -> None:
        happened = getattr(self, f"_{kind.replace(' ', '_')}")()
        self.events[happened or kind] += 1
        time.sleep(self._dice.uniform(0.0, 0.4))

    def _end_phase(self) -> None:
        self._file("go-all", self._phase).touch()
        self._job.wait_until(lambda: not any(n in self._phase_of for n in self._here("worker")))
        self._file("hurry", self._phase).touch()
        if self._phase < PHASES - 1 and self._dice.random() < 0.5:
            return  # What comes next may happen while tables are saved or loaded.
        steps = [self._file("steps", self._phase, n) for n in range(self._plan.workers)]
        self._job.wait_until(lambda: all(each.exists() for each in steps))

    def _file(self, kind: str, *words: object) -> Path:
        return self._job.folder / "-".join(map(str, (kind, self._life, *words)))

    def _here(self, *roles: str) -> list[str]:
        processes = self._job.processes.items()
        return [n for n, each in processes if each.is_alive() and n.rstrip("0123456789") in roles]

    def _start(self, name: str) -> None:
        role = name.rstrip("0123456789")
        number = int(name.removeprefix(role))
        variables = {}
        if role == "server" and number >= self._first:
            variables["HVDLITE_PS_JOIN"] = "1"
        if role == "worker" and number >= self._plan.workers:
            variables |= {"HVDLITE_PS_JOIN": "1", "SOAK_PHASE": str(self._phase_of[name])}
        self._job.start(role, number, **variables)

    # -- events

    def _kill(self) -> str:
        """Kill one process, several, all of a role or all; start them again."""
        every = self._here("scheduler", "server", "worker")
        role = self._dice.choice(["scheduler", "server", "worker"])
        some = self._dice.choice([1, 1, 1, 2, 3])
        chosen = self._dice.choice(
            [*[self._dice.sample(every, min(some, len(every)))] * 8, self._here(role), every]
        )
        for name in [*chosen]:
            try:
                self._job.kill(name)
            except ProcessLookupError:  # A server that was to leave has ended meanwhile.
                chosen = [each for each in chosen if each != name]
        time.sleep(self._dice.choice([0.0, 0.0, 0.2]))
        for name in chosen:
            self._start(name)
        roles = sorted({name.rstrip("0123456789") for name in chosen})
        return f"kill of {' and '.join(roles)}"

    def _stop(self) -> None:
        chosen = self._dice.choice(self._here("scheduler", "server", "worker"))
        os.kill(self._job.pid(chosen), signal.SIGSTOP)
        time.sleep(self._dice.uniform(0.0, 1.0))
        os.kill(self._job.pid(chosen), signal.SIGCONT)

    def _server_joins(self) -> str:
        alive = self._here("server")
        if len(alive) >= MOST_SERVERS:
            return self._servers_leave()
        free = next(n for n in range(self._first, 9) if f"server{n}" not in alive)
        self._start(f"server{free}")
        return ""

    def _servers_leave(self) -> str:
        most = max(1, len(self._here("server")) - 1)
        put(self._job.folder / "servers", str(self._dice.randint(1, most)))
        return "servers leave"

    def _worker_joins(self) -> str:
        here = [name for name in self._here("worker") if name in self._phase_of]
        if self._plan.framework == "digits" or len(here) >= MOST_VISITORS:
            return self._kill()
        name = f"worker{self._visitors.pop(0)}"
        self._phase_of[name] = self._phase
        self._start(name)
        return ""

    def _worker_leaves(self) -> str:
        here = [name for name in self._here("worker") if name in self._phase_of]
        if not here:
            return self._worker_joins() or "worker joins"
        self._file("go", here[0].removeprefix("worker")).touch()
        return ""

    def _full_disk(self) -> None:
        (self._job.folder / "full").touch()
        time.sleep(self._dice.uniform(0.0, 0.7))
        (self._job.folder / "full").unlink()


class Oracle:
    """The values that the steps of all lives make, one after another, in one process."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._folder, self._plan = folder, plan
        self.steps = 0  # That were made, with those that a load has undone.
        self._sums = [np.zeros(size) for size in SIZES]
        self._rows = np.zeros((ROWS, LENGTH))
        self._of_digits: list[int] = []

    def check(self) -> None:
        """Compare what all workers have found in each life."""
        for life in range(LIVES):
            self._add(life)
            wanted = self._wanted()
            for number in range(self._plan.workers):
                found = np.load(self._folder / f"found-{life}-{number}")
                assert np.array_equal(found, wanted), (
                    life, number, np.flatnonzero(found != wanted).tolist()[:9],
                )  # fmt: skip

    def _wanted(self) -> Array:
        if self._plan.framework == "digits":
            return flat(train_in_one("adam", self._plan.workers, self._of_digits))
        rows = [self._rows.reshape(-1)] if self._plan.framework == "numpy" else []
        return np.concatenate([*self._sums, *rows])

    def _add(self, life: int) -> None:
        for worker in range(self._plan.workers):
            names = [f"steps-{life}-{phase}-{worker}" for phase in range(PHASES)]
            saved, loaded, end = (int((self._folder / name).read_text()) for name in names)
            kept = [*range(saved), *range(loaded, end)]
            self.steps += end
            if self._plan.framework != "digits":
                self._push(life, kept, worker)
            elif worker == 0:
                self._of_digits += [life * LIFE_STEPS + step for step in kept]
        for path in self._folder.glob(f"visitor-{life}-*"):
            _, _, phase, worker = path.name.split("-")
            gone = self._folder / path.name.replace("visitor", "gone")
            first, *of_rows = map(int, path.read_text().split())
            end = int(gone.read_text())
            self.steps += end - first
            if int(phase) != 1:  # Its first step of the rows may be another one.
                rows = range((*of_rows, first)[0], end)
                self._push(life, range(first, end), int(worker), rows)

    def _push(
        self, life: int, steps: Iterable[int], worker: int, of_rows: Iterable[int] | None = None
    ) -> None:
        for step in steps:
            gradients = gradients_of(life, step, worker)
            self._sums = [a + b for a, b in zip(self._sums, gradients, strict=True)]
        for step in steps if of_rows is None else of_rows:
            ids, rows = rows_of(life, step, worker)
            self._rows[ids] += rows


def run_job(folder: Path, seed: int, events: int) -> tuple[Plan, Counter[str], int]:
    """Run a job; return what has happened to it, and how many steps its workers have made."""
    dice = random.Random(seed)
    framework = dice.choice(["numpy", "numpy", "torch", "digits", "keras"])
    mode = "sync" if framework == "digits" else dice.choice(["sync", "async", "ssp"])
    staleness = dice.randint(0, 3) if mode == "ssp" else None
    plan = Plan(framework, mode, staleness, dice.randint(1, 3))
    happened: Counter[str] = Counter()
    for life in range(LIVES):
        servers = dice.randint(1, 3)
        variables = {
            "HVDLITE_PS_SNAPSHOT": str(folder / f"snapshots-{life}"),
            "HVDLITE_PS_SNAPSHOT_EVERY": "1",
            "HVDLITE_PS_WORKERS": "independent",
            # All that are killed come again; the whole soak may be stopped for long.
            "HVDLITE_PS_TIMEOUT": "3600", "HVDLITE_PS_WORKER_TIMEOUT": "3600",
            "KERAS_BACKEND": "torch",
        }  # fmt: skip
        with cluster(Site(folder), servers, plan.workers, main, life, plan, **variables) as job:
            this = Life(job, life, servers, plan, dice)
            this.run(events)
            happened += this.events
        for log in folder.glob("*.log"):
            log.rename(log.with_suffix(f".{life}"))
    oracle = Oracle(folder, plan)
    oracle.check()
    return plan, happened, oracle.steps
