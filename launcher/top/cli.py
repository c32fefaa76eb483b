"""The command line hvdlite-top."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.inspection.asking import Answer
from hvdlite.launcher.inspection.requests import ABOUT, LOOK
from hvdlite.launcher.live.table import check_rich, lines_of, printable
from hvdlite.launcher.processes.event_loop import EventLoop
from hvdlite.launcher.top.connection import JobConnection, Unreachable, find_jobs
from hvdlite.launcher.top.pages import JobPage, ListPage, Pages

USAGE_CODE, NO_JOB_CODE = 2, 1
ONCE_SECONDS = 10.0  # How long `--once` waits for ranks that have not told of steps yet.
ONCE_SIZE = (120, 40)  # Where it is printed to no terminal.
POLL_SECONDS = 0.5
SILENT_SECONDS = 30.0  # After which a job is asked again that did not answer: it may be stopped.


def main(argv: Sequence[str] | None = None) -> int:
    """Show the running jobs of this user, and return the exit code.

    That is 1 where there is none, and 2 for wrong usage.
    """
    parser = argparse.ArgumentParser(
        prog="hvdlite-top", description="Show what the ranks of a running job do.",
        epilog="Keys: arrows or a number choose a rank; s shows its stack, t the last calls of a "
        "tensor; w writes a timeline of the next 10 steps; q quits.",
    )  # fmt: skip
    parser.add_argument(
        "--job", type=int, metavar="N", help="the job: its number in the list, or its process id"
    )
    parser.add_argument("--once", action="store_true", help="print one table, and end")
    args = parser.parse_args(argv)
    loop = EventLoop()
    try:
        check_rich("hvdlite-top")
        return _main(args, loop)
    except ConfigError as error:
        print(f"hvdlite-top: {error}", file=sys.stderr)
        return USAGE_CODE
    except (KeyboardInterrupt, BrokenPipeError):
        return 128 + signal.SIGINT
    finally:
        loop.close()


def _main(args: argparse.Namespace, loop: EventLoop) -> int:
    jobs, said = running_jobs(loop)
    for sentence in said:
        print(f"hvdlite-top: {sentence}", file=sys.stderr)
    if not jobs:
        print("hvdlite-top: no job of yours runs by hvdlite-run on this host", file=sys.stderr)
        return NO_JOB_CODE
    chosen = _choose(jobs, args.job)
    if args.once:
        if chosen is None:
            print("\n".join(spell_jobs(jobs)))
            raise ConfigError(f"{len(jobs)} jobs run: choose one by --job")
        return _print_once(chosen[0], loop)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("this is no terminal: --once prints one table")
    return _show(jobs, chosen, loop)


Job = tuple[JobConnection, dict[str, Any]]  # With what `about` answers.


def running_jobs(loop: EventLoop) -> tuple[list[Job], list[str]]:
    """Return the jobs that answer, the oldest first, and sentences about others."""
    paths, said = find_jobs()
    jobs: list[Job] = []
    for path in paths:
        try:
            connection = JobConnection(loop, path)
            jobs.append((connection, _ask(connection, ABOUT)))
        except Unreachable as error:
            if os.path.exists(path):  # Else the job has ended meanwhile.
                said.append(f"the job at {path} {error}")
    return sorted(jobs, key=_age), said


def _ask(connection: JobConnection, request: str) -> Answer:
    answer = connection.ask_now([request])
    if "error" in answer:
        connection.close()
        raise Unreachable(f"refuses to answer: {answer['error']}")
    return answer


def _choose(jobs: Sequence[Job], wanted: int | None) -> Job | None:
    if wanted is None:
        return jobs[0] if len(jobs) == 1 else None
    for job in jobs:
        if job[1]["pid"] == wanted:
            return job
    if 0 < wanted <= len(jobs):
        return jobs[wanted - 1]
    raise ConfigError(f"--job {wanted}: there is none:\n" + "\n".join(spell_jobs(jobs)))


def spell_jobs(jobs: Sequence[Job]) -> list[str]:
    """Return a line for each job."""
    rows = []
    for number, (_, about) in enumerate(jobs, 1):
        program, *words = about["command"] or [""]
        command = printable(shlex.join([os.path.basename(program), *words]))
        ranks = f"{about['ranks']} rank{'' if about['ranks'] == 1 else 's'}"
        row = (str(number), f"pid {about['pid']}", ranks, _spell_start(about["started"]), command)
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    return ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]


def _spell_start(at: float) -> str:
    began, now = time.localtime(at), time.localtime()
    today = began[:3] == now[:3]
    return f"since {time.strftime('%H:%M' if today else '%Y-%m-%d %H:%M', began)}"


def _print_once(connection: JobConnection, loop: EventLoop) -> int:
    end = loop.now() + ONCE_SECONDS
    while True:
        try:
            job = _ask(connection, LOOK)
        except Unreachable as error:
            print(f"hvdlite-top: the job {error}", file=sys.stderr)
            return NO_JOB_CODE
        ranks = job["ranks"]
        all_step = all(rank["step"] is not None for rank in ranks)
        if (len(ranks) >= job["job"]["ranks"] and all_step) or loop.now() >= end:
            break
        pause = loop.now() + POLL_SECONDS
        while (left := pause - loop.now()) > 0:
            loop.run_once(left)
    columns, _ = shutil.get_terminal_size(ONCE_SIZE)
    height = 2 * len(job["ranks"]) + ONCE_SIZE[1]
    color = sys.stdout.isatty()
    print("\n".join(lines_of(job, columns, height, share=1.0, color=color, whole=True)))
    return 0


def _show(jobs: list[Job], chosen: Job | None, loop: EventLoop) -> int:
    pages = Pages(loop)
    running = RunningJobs(loop, jobs)

    def rows() -> list[tuple[int, str]]:
        running.look(first.look)
        found = running.jobs
        lines = spell_jobs(found)
        return [(about["pid"], line) for (_, about), line in zip(found, lines, strict=True)]

    def opened(job: Job, back: ListPage | None) -> JobPage:
        connection, about = job
        return JobPage(pages, connection, about["pid"], back=back)

    first = ListPage(pages, rows)

    def open_job(pid: int) -> None:
        job = next((job for job in running.jobs if job[1]["pid"] == pid), None)
        if job is None:  # It has ended since the list was drawn.
            first.look()
        else:
            pages.turn_to(opened(job, first))

    first.opened = open_job
    return pages.run(first if chosen is None else opened(chosen, None))


class RunningJobs:
    """The jobs of a list, which come and go while it is shown."""

    def __init__(self, loop: EventLoop, jobs: Sequence[Job]) -> None:
        self._loop, self._jobs = loop, list(jobs)
        self._asked: list[JobConnection] = []
        self._looks = False
        self._silent: dict[str, float] = {}  # Sockets that did not answer, and since when.

    @property
    def jobs(self) -> list[Job]:
        """Those that run, the oldest first."""
        return sorted((job for job in self._jobs if job[0].open), key=_age)

    def look(self, changed: Callable[[], None]) -> None:
        """Look for new jobs; `changed` is called when one has told what it is.

        What happens while a connection is made, such as the next look, is dealt with meanwhile.
        """
        if self._looks:
            return
        self._looks = True
        since = self._loop.now() - SILENT_SECONDS
        self._silent = {path: when for path, when in self._silent.items() if when > since}
        self._jobs = [job for job in self._jobs if job[0].open]
        self._asked = [each for each in self._asked if each.open]
        known = {each.path for each in (*self._asked, *(job[0] for job in self._jobs))}
        known.update(self._silent)
        try:
            for path in find_jobs(known)[0]:
                try:
                    connection = JobConnection(self._loop, path)
                except Unreachable:
                    self._silent[path] = self._loop.now()
                else:
                    self._asked.append(connection)
                    connection.ask([ABOUT], partial(self._told, connection, changed))
        finally:
            self._looks = False

    def _told(self, connection: JobConnection, changed: Callable[[], None], about: Answer) -> None:
        if "error" not in about:  # Else it stays among those that are not asked again.
            self._asked.remove(connection)
            self._jobs.append((connection, about))
            changed()


def _age(job: Job) -> tuple[float, int]:
    return job[1]["started"], job[1]["pid"]
