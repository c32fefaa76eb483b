"""init and shutdown of real jobs: again and again, with ranks that are late, and with errors."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.forks import NUMPY
from tests.launcher.jobs import launch
from tests.parallel.jobs import MPI, TCP_BY_MPIRUN, ranks, run_command

both = pytest.mark.usefixtures("transport")
by_mpirun = pytest.mark.usefixtures("by_mpirun")

# Every script sees `rank`, `size` and what else is there, such as `check()`.
PRELUDE = """
import gc, os, sys, threading, time
import numpy as np
from tests.parallel.rank_helpers import *
"""
HVD = "import hvdlite.numpy as hvd\n"
MPI4PY = "from mpi4py import MPI\n"
RESIDENT = """
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
"""


def run(size: int, script: str, *, timeout: float = 60, **env: str) -> str:
    """Run `script` on every rank; returns the output, after all of them have ended well."""
    command = ranks(size, sys.executable, "-c", PRELUDE + script, preload=NUMPY)
    done = run_command(command, timeout=timeout, **env)
    assert done.returncode == 0, done.stdout
    assert done.stdout.count(" done\n") == size, done.stdout
    return done.stdout


# -- again and again


@both
def test_sixty_jobs_in_one_process_keep_no_descriptor_and_no_memory() -> None:
    run(3, HVD + RESIDENT + """
gc.disable()  # what is let go must not wait for it
def cycle():
    hvd.init()
    hvd.allreduce(np.ones(300_000, np.float32), name="a")
    hvd.shutdown()
for _ in range(10):
    cycle()
assert wait_until(nothing_ends)
before, memory = belongings(), resident()
for _ in range(60):
    cycle()
assert wait_until(nothing_ends) and belongings() == before, (before, belongings())
# Each cycle has 1 MiB of its own: what is kept of all of them would be 60 and more.
assert resident() - memory < 12 << 20, (resident() - memory) >> 20
done()
""")  # fmt: skip


@pytest.mark.parametrize("count", [100, pytest.param(1000, marks=pytest.mark.soak)])
def test_hundreds_of_jobs_in_one_process_keep_nothing(count: int) -> None:
    """Less than an object for each fifth job, and less than 16 KiB for each."""
    run(2, HVD + RESIDENT + f"COUNT = {count}" + """
from collections import Counter
def cycles(count):
    for number in range(count):
        hvd.init()
        total = hvd.allreduce(np.full(1000, rank + 1.0), name="a", op=hvd.Sum)
        assert total.tolist() == [3.0] * 1000
        hvd.shutdown()
    assert wait_until(nothing_ends)
    gc.collect()
    return belongings(), len(gc.get_objects()), resident()
before, objects, memory = cycles(20)
after, objects_after, memory_after = cycles(COUNT)
assert after == before, (Counter(after[0]) - Counter(before[0]), before[1], after[1])
assert objects_after - objects < COUNT / 5, objects_after - objects
assert memory_after - memory < COUNT << 14, (memory_after - memory) >> 10
done()
""", timeout=120)  # fmt: skip


# -- MPI, started by whoever

LATER = "import mpi4py; mpi4py.rc.initialize = False\n"
STARTS = {
    "nobody": HVD + "hvd.init()",
    "hvdlite before mpi4py": HVD + "hvd.init(); from mpi4py import MPI",
    "mpi4py before hvdlite": MPI4PY + HVD + "hvd.init()",
    "no initialize": LATER + HVD + "hvd.init()",
    "no initialize, imported": LATER + MPI4PY + HVD + "hvd.init()",
    "no initialize, a communicator": LATER + MPI4PY + HVD + "hvd.init(MPI.COMM_WORLD)",
    "no initialize, a list": LATER + MPI4PY + HVD + "hvd.init([0, 1])",
    "by the user": LATER + MPI4PY + "MPI.Init()\n" + HVD + "hvd.init()",
    "by the user with a low thread level": "import mpi4py; mpi4py.rc.thread_level = 'single'\n"
    + MPI4PY + HVD + "hvd.init()",
    "no finalize": "import mpi4py; mpi4py.rc.finalize = False\n" + HVD + "hvd.init()",
    "mpi4py between two": HVD + "hvd.init(); hvd.shutdown()\n" + MPI4PY + "hvd.init()",
    "a low thread level": "import mpi4py; mpi4py.rc.threads = False\n" + HVD + "hvd.init()",
}  # fmt: skip
# What the script does at its end; those above just end.
ENDS = {
    "shutdown": "hvd.shutdown()",
    "finalize after shutdown": """hvd.shutdown(); MPI.Finalize()
try:
    hvd.init()
except hvd.HorovodInternalError as error:
    assert "MPI was ended in this process" in str(error), error
else:
    raise AssertionError("MPI has begun again")
""",
    "finalize without shutdown": "MPI.Finalize()",
}
# Over TCP hvdlite leaves MPI alone, so that few orders stand for all of them.
OVER_TCP = ("nobody", "mpi4py before hvdlite", "by the user", "mpi4py between two")


def check_mpi(script: str, end: str = "") -> None:
    """Nobody complains of an end of MPI."""
    output = run(2, f"{script}\ncheck()\n{MPI4PY}" + """
assert MPI.COMM_WORLD.allreduce(1) == size and hvd.mpi_enabled()
assert MPI.COMM_WORLD.Get_errhandler() == MPI.ERRORS_RETURN
hvd.shutdown(); hvd.init(); check("again")
""" + f"{end}\ndone()\n")  # fmt: skip
    assert "Error" not in output and "abort" not in output.lower(), output


@pytest.mark.parametrize(
    ("how", "by_mpirun"),
    [
        *((how, MPI) for how in STARTS),
        *(
            pytest.param(how, TCP_BY_MPIRUN, marks=[] if how in OVER_TCP else pytest.mark.soak)
            for how in STARTS
        ),
    ],
    indirect=["by_mpirun"],
)
@by_mpirun
def test_mpi_is_started_in_every_order_of_imports(how: str) -> None:
    check_mpi(STARTS[how])


@by_mpirun
@pytest.mark.parametrize("end", ENDS)
def test_mpi_is_ended_once(end: str) -> None:
    check_mpi(STARTS["no initialize"], ENDS[end])


# -- ranks that are late

LATE = (
    HVD
    + """
import pathlib
if rank == 2:
    hear("complaint")
else:
    import logging
    class Note(logging.Handler):
        def emit(self, record):
            if MISSES_RANK_2 in record.getMessage():
                say("complaint")
    logging.getLogger("hvdlite").addHandler(Note())
    logging.getLogger("hvdlite").addHandler(logging.StreamHandler())
"""
)


def check_late(output: str, misses: str) -> None:
    """Rank 0 complains once, for all that wait."""
    lines = [line for line in output.splitlines() if "has waited" in line]
    pattern = r"hvdlite WARNING: rank 0 of 3 has waited 3 s in init\(\), since \d\d:\d\d:\d\d: "
    assert re.search(pattern + misses, output) and len(lines) == 1, output
    assert "the limit is 12 s: HVDLITE_START_TIMEOUT" in lines[0]


@pytest.mark.usefixtures("over_mpi")
@pytest.mark.parametrize("imported", ["", MPI4PY])
def test_a_late_rank_is_named_while_the_others_wait_for_mpi(imported: str) -> None:
    output = run(3, imported + "MISSES_RANK_2 = 'rank 2 on this host'\n" + LATE +
                 "hvd.init(); check(); done()", HVDLITE_START_TIMEOUT="12",
                 HVDLITE_LOG_HIDE_TIME="1")  # fmt: skip
    check_late(output, r"rank 2 on this host \(\S+\) has not called init\(\)")


def test_a_late_rank_is_named_while_the_others_wait() -> None:
    output = run(3, "MISSES_RANK_2 = 'did not come: 2'\n" + LATE + "hvd.init(); check(); done()",
                 HVDLITE_START_TIMEOUT="12", HVDLITE_LOG_HIDE_TIME="1")  # fmt: skip
    check_late(output, r"these ranks did not come: 2 \(seen: 0, 1\)")


BY_MPIRUN = ("--launcher", "mpirun", "--transport", "mpi")


@pytest.mark.usefixtures("over_mpi")
@pytest.mark.parametrize("imported", ["", MPI4PY])
def test_a_rank_that_never_comes_to_mpi_is_named_at_the_end(imported: str) -> None:
    script = imported + HVD + "time.sleep(600 * (rank == 1)); hvd.init()"
    done = launch(*BY_MPIRUN, "-np", "2", "--start-timeout", "2",
                  sys.executable, "-c", PRELUDE + script)  # fmt: skip
    output = done.stderr
    cause = "hvdlite-run: rank 0 failed: HorovodInternalError: rank 0 of 2 has waited 2 s in init()"
    assert done.returncode == 1 and cause in output, output
    assert re.search(r"rank 0 of 2 has waited 2 s in init\(\), since .*: rank 1 on this host "
                     r"\(\S+\) has not called init\(\); the limit is 2 s: HVDLITE_START_TIMEOUT "
                     r"\(seconds\) and hvdlite-run --start-timeout set it\. ", output)  # fmt: skip
    assert "Current thread" not in output  # of a dump by faulthandler


@pytest.mark.usefixtures("over_mpi")
def test_a_rank_that_stops_in_the_middle_ends_the_wait_inside_mpi() -> None:
    script = (
        HVD
        + """
from hvdlite.common.transport import mpi
if rank == 1:
    mpi.exchange_versions = lambda comm: time.sleep(600)
hvd.init()
"""
    )
    done = launch(*BY_MPIRUN, "-np", "2", "--start-timeout", "2",
                  sys.executable, "-c", PRELUDE + script)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"hvdlite-run: rank [01] failed", done.stderr), done.stderr  # both give up
    assert "all ranks on this host" in done.stderr and "the limit is 2 s" in done.stderr


@both
def test_who_gave_up_can_try_again_and_meet_who_was_late() -> None:
    started = "if STARTED_BY_MPI: from mpi4py import MPI\n"  # or the wait would be inside MPI
    run(3, started + HVD + """
if rank != 2:
    try:
        hvd.init()
    except hvd.HorovodInternalError as error:
        assert "2" in str(error) and not hvd.is_initialized(), error
        say(f"gave up {rank}")
# Who comes again before that meets another rank in its first wait.
hear("gave up 0"); hear("gave up 1")
hvd.init(); check(); hvd.shutdown(); hvd.init(); check()
done()
""", HVDLITE_START_TIMEOUT="2")  # fmt: skip


@both
def test_the_watchdog_of_the_user_stays_set() -> None:
    """faulthandler has one slot for a watchdog: it is the user's (pytest sets it, too).

    The watchdog reads the frames of a thread while that runs, which may end the process: it does so
    once, when threads mostly wait.
    """
    run(2, HVD + """
import faulthandler, tempfile
log = tempfile.TemporaryFile()
faulthandler.dump_traceback_later(3.0, file=log)
hvd.init(); check()
assert wait_until(lambda: os.fstat(log.fileno()).st_size > 0), "it was cancelled"
done()
""")  # fmt: skip


# -- child processes

CHILD = (
    HVD
    + """
if __name__ == "__main__":
    import multiprocessing, subprocess
    hvd.init(); check()
"""
)


SENTENCE = "was started by rank 1"


@both
def test_a_spawned_child_is_told_and_its_parent_goes_on() -> None:
    output = run(2, CHILD + """
    if rank == 1:
        process = multiprocessing.get_context("spawn").Process(target=call_init)
        process.start(); process.join(30)
        assert process.exitcode == 1, process.exitcode
    check("after")
    done()
""")  # fmt: skip
    assert SENTENCE in output and 'if __name__ == "__main__"' in output, output


@both
def test_a_script_that_a_rank_runs_is_told_and_its_parent_goes_on() -> None:
    output = run(2, CHILD + """
    command = [sys.executable, "-c", "import hvdlite.numpy as h; h.init()"]
    if rank == 1:
        child = subprocess.run(command, timeout=30)
        assert child.returncode == 1, child
    check("after")
    hvd.shutdown()
    if rank == 1:
        child = subprocess.run(command, timeout=30)
        assert child.returncode == 1, child
    hvd.init(); check("again")
    done()
""")  # fmt: skip
    assert SENTENCE in output and "hvdlite-run or hvdlite.run" in output, output


@both
def test_a_rank_can_start_a_job_of_its_own() -> None:
    run(2, CHILD + """
    script = "import hvdlite.numpy as h; h.init(); print('inner', h.rank(), h.size(), flush=True)"
    if rank == 1:
        command = [sys.executable, "-m", "hvdlite.launcher", "-np", "2"]
        command += [sys.executable, "-c", script]
        inner = subprocess.run(command, timeout=50, capture_output=True, text=True)
        words = sorted(line.partition("inner")[2] for line in inner.stdout.splitlines())
        assert words == [" 0 2", " 1 2"], inner
    check("after")
    done()
""")  # fmt: skip


# -- errors


@both
def test_after_every_error_of_init_nothing_is_initialised_and_the_next_init_works(
    tmp_path: Path,
) -> None:
    script = "from tests.parallel import worker_init_errors\nworker_init_errors.main()"
    run(2, script, timeout=180, FOLDER=str(tmp_path))


@both
def test_an_error_of_a_later_call_leaves_the_job_as_it_was() -> None:
    run(2, HVD + """
first, second = hvd.ProcessSet([0]), hvd.ProcessSet([1])
hvd.init(process_sets=[first])
for wrong in ([second, hvd.ProcessSet([0])], [second, hvd.ProcessSet([1])], [hvd.ProcessSet([5])]):
    try:
        hvd.init(process_sets=wrong)
    except ValueError:
        assert hvd.is_initialized() and second.process_set_id is None
    else:
        raise AssertionError(wrong)
    check()
hvd.init(process_sets=[first, second])
assert (first.process_set_id, second.process_set_id) == (1, 2)
done()
""")  # fmt: skip
