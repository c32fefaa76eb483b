"""How long hvdlite takes to import, and to start a job.

    python benchmarks/start.py                  # the import, and jobs of 8 ranks
    python benchmarks/start.py --import-only    # the import alone

Every measurement is made in new processes, in turns: what `import hvdlite.torch` adds to
`import torch` (left out where there is no torch); and the time from the start of the launcher to
the end of the first allreduce on all ranks, of hvdlite-run as it chooses its launcher (its agents,
on one host), of hvdlite-run with mpirun, and of a bare mpirun with a program of mpi4py.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jobs import hvdlite_run, in_turns, run_command
from measuring import Spread, make_parser, say, table, write

from hvdlite.launcher.mpirun.mpi import OPENMPI, find_mpi

IMPORT = """
import time, torch
start = time.perf_counter()
import hvdlite.torch
print(time.perf_counter() - start)
"""
HVDLITE = """
import numpy as np
import hvdlite.numpy as hvd
hvd.init()
hvd.allreduce(np.ones(1))
"""
MPI4PY = """
import numpy as np
from mpi4py import MPI
MPI.COMM_WORLD.Allreduce(np.ones(1), np.ones(1))
"""
# What starts the ranks -> --launcher.
LAUNCHERS = {"agents": "auto", "mpirun": "mpirun"}
# The clock is that of the machine: all processes agree about it.
NOTE_TIME = """
import os, sys, time
now = time.monotonic()
with open(os.path.join(sys.argv[1], str(os.getpid())), "w") as file:
    file.write(str(now))
"""


def time_import() -> float:
    """Return the seconds that hvdlite adds to an import of torch."""
    command = [sys.executable, "-c", IMPORT]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout)


def time_job(launcher: list[str], program: str) -> float:
    """Start a job; return the seconds until its last rank has run `program`.

    `launcher` is a command line that ends with the interpreter of the ranks.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as empty:
        command = [*launcher, "-c", program + NOTE_TIME, folder]
        start = time.monotonic()
        run_command(command, empty)
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - start


def mpirun(ranks: int) -> list[str]:
    """Return a plain mpirun command of the MPI that hvdlite-run uses."""
    mpi = find_mpi(os.environ, hosts_given=False)
    command = [mpi.program, "-np", str(ranks)]
    if mpi.kind == OPENMPI:
        command += ["--oversubscribe", "--bind-to", "none"]
        command += ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return [*command, sys.executable]


def make_ways(ranks: list[int]) -> dict[str, Callable[[], float]]:
    """Return the functions to measure, by name."""
    ways: dict[str, Callable[[], float]] = {}
    if importlib.util.find_spec("torch"):
        ways["import hvdlite.torch after torch"] = time_import
    else:
        say("left out: import hvdlite.torch (there is no torch)")
    for count in ranks:
        for name, launcher in LAUNCHERS.items():
            command = [*hvdlite_run(count), "--launcher", launcher, sys.executable]
            ways[f"hvdlite-run -np {count}, {name}"] = partial(time_job, command, HVDLITE)
        ways[beside(count)] = partial(time_job, mpirun(count), MPI4PY)
    return ways


def beside(ranks: int) -> str:
    """Return the name of the job beside which those of hvdlite stand."""
    return f"mpirun -np {ranks}, mpi4py"


def print_table(found: Mapping[str, Spread], ranks: Sequence[int]) -> None:
    """Print the times, and the ratio of each start of a job to that by mpirun alone."""
    rows = []
    for name, spread in found.items():
        bases = [found[beside(count)].median for count in ranks if f"-np {count}," in name]
        ratio = "".join(f"{spread.median / base:.2f}" for base in bases)  # none for the import
        rows.append([name, str(spread), ratio])
    print(table(["", "time", "to mpirun, mpi4py"], rows))


def main() -> None:
    parser = make_parser("How long imports and starts take.", "start", [8])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--import-only", action="store_true", help="start no jobs")
    args = parser.parse_args()
    # As where it is installed: no module has to be compiled in each process.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    ways = make_ways([] if args.import_only else args.ranks)
    for way in ways.values():
        way()
    jobs = in_turns(ways, args.rounds)
    found = {name: Spread.quartiles(seconds) for name, seconds in jobs.items()}
    print_table(found, args.ranks)
    records = [
        {"entry": name, "seconds": vars(each), "jobs": jobs[name]} for name, each in found.items()
    ]
    write(args.json, records)


if __name__ == "__main__":
    main()
