"""Jobs of ranks that have one computing thread each: one job alone, or several in turns.

Libraries that are compared run in jobs of their own. The jobs are launched in turns (A B C A B C),
and each figure is the median over the jobs with the least and the most of them.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from measuring import Spread, say, write

K = TypeVar("K", str, tuple[str, str])
V = TypeVar("V")

JOB_SECONDS = 1800  # A training with compressors takes minutes on a busy machine.
END_SECONDS = 30  # within which a job ends all its ranks
MEETING_SECONDS = 60
LEFT_OUT = "left_out"  # instead of ``seconds`` in the record of what a library lacks: why
Record = dict[str, Any]


def environment() -> dict[str, str]:
    """Return the environment variables of a job."""
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def run_ranks(function: Callable[..., Any], ranks: int, *arguments: Any) -> Any:
    """Call `function` on every rank of a job; return what it returns on rank 0."""
    import hvdlite

    environ = environment()
    here = str(Path(__file__).parent)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, (here, environ.get("PYTHONPATH"))))
    return hvdlite.run(function, arguments, np=ranks, env=environ)[0]


def hvdlite_run(ranks: int, python: str = sys.executable) -> list[str]:
    """Return the first words of a command that starts `ranks` ranks by the hvdlite of `python`."""
    return [python, "-m", "hvdlite.launcher", "-np", str(ranks)]


def run_job(
    script: str, words: Sequence[str], ranks: int, python: str = sys.executable,
    flags: Sequence[str] = (),
) -> Any:  # fmt: skip
    """Run `script` on all ranks of a job; return the JSON that its rank 0 writes to --rank-file.

    `flags` are further ones of hvdlite-run.

    Raises `subprocess.CalledProcessError` for a job that fails, and `subprocess.TimeoutExpired`
    for one that takes longer than `JOB_SECONDS`; no rank is left behind.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "measured.json"
        program = [python, script, *words, "--rank-file", str(file)]
        command = [*hvdlite_run(ranks, python), *flags, *program]
        # The folder is empty, so that `-m` finds the hvdlite of `python` and no other.
        run_command(command, folder)
        return json.loads(file.read_text())


def run_command(
    command: Sequence[str], folder: str, environ: Mapping[str, str] | None = None
) -> None:
    """Run a launcher in `folder`, with all variables of `environ`; see `run_job` for errors."""
    environ = environment() if environ is None else environ
    with subprocess.Popen(command, cwd=folder, env=environ) as process:
        try:
            code = process.wait(JOB_SECONDS)
        except BaseException:  # also Ctrl-C: the launcher ends its ranks before itself
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_SECONDS)
            process.kill()
            raise
    if code:
        raise subprocess.CalledProcessError(code, command)


def addresses(meeting: Path, rank: int, size: int) -> list[str]:
    """Return an address for each rank; every rank has chosen its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        own = f"127.0.0.1:{free.getsockname()[1]}"
    files = [meeting.with_suffix(f".address{number}") for number in range(size)]
    written = meeting.with_suffix(f".part{rank}")
    written.write_text(own)
    written.rename(files[rank])
    end = time.monotonic() + MEETING_SECONDS
    while not all(file.exists() for file in files):
        if time.monotonic() > end:
            raise TimeoutError("not all ranks have written their address")
        time.sleep(0.01)
    return [file.read_text() for file in files]


def in_turns(ways: Mapping[K, Callable[[], V]], rounds: int) -> dict[K, list[V]]:
    """Call each way once in each round; return the results by way."""
    found: dict[K, list[V]] = {name: [] for name in ways}
    for number in range(1, rounds + 1):
        for name, way in ways.items():
            start = time.monotonic()
            found[name].append(way())
            label = name if isinstance(name, str) else " ".join(map(str, name))
            say(f"round {number} of {rounds}, {label}: {time.monotonic() - start:.1f} s")
    return found


def run_jobs(
    script: str, args: argparse.Namespace, words: Sequence[str]
) -> tuple[list[Record], list[str]]:
    """Return the records of all `args.entries` on all `args.ranks`, and what was left out.

    Each job of `script` gets the options `words`, one entry and one number of ranks.
    """
    records: list[Record] = []
    left_out: dict[str, None] = {}
    for ranks in args.ranks:
        say(f"{ranks} ranks")
        own = {entry: ["--ranks", str(ranks), "--entries", entry] for entry in args.entries}
        ways = {
            entry: partial(run_job, script, [*words, *added], ranks, flags=flags_of(entry))
            for entry, added in own.items()
        }
        for jobs in in_turns(ways, args.rounds).values():
            left_out |= dict.fromkeys(each[LEFT_OUT] for each in jobs[0] if LEFT_OUT in each)
            records += summarize([[each for each in job if "seconds" in each] for job in jobs])
    return records, [*left_out]


def flags_of(entry: str) -> list[str]:
    """Return the flags of hvdlite-run for the job of a library: ranks of some start by mpirun."""
    return ["--mpi"] if entry in ("MPI", "Horovod") else []


def finish(path: Path, records: Sequence[Record], left_out: Sequence[str]) -> None:
    """Print what was left out, and write all figures."""
    for each in left_out:
        print(f"\nleft out: {each}")
    write(path, records)


def summarize(jobs: Sequence[Sequence[Record]]) -> list[Record]:
    """Merge the records of jobs that have measured the same cases in the same order.

    In each job's records ``seconds`` is a number; in the result it is the `Spread` of the jobs.
    """
    summary = []
    for records in zip(*jobs, strict=True):
        seconds = [record["seconds"] for record in records]
        summary.append({**records[0], "seconds": vars(Spread.extremes(seconds)), "jobs": seconds})
    return summary


def add_job_options(parser: argparse.ArgumentParser, rounds: int = 5) -> None:
    """Add the options of a benchmark whose libraries run in separate jobs."""
    parser.add_argument("--rounds", type=int, default=rounds, help="jobs of each entry, in turns")
    parser.add_argument("--rank-file", type=Path, help=argparse.SUPPRESS)  # of a job's ranks
