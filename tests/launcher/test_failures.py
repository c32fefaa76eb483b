"""What the end of the output says when a job fails: the cause, once, and what helps."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import hvdlite
from hvdlite.common.collectives.table import disagreement
from hvdlite.common.requests.messages import Request
from hvdlite.launcher.command_line.flags import make_parser
from hvdlite.launcher.command_line.options import resolve
from hvdlite.launcher.decisions.endings import Failure
from hvdlite.launcher.hosts.ssh import diagnose
from hvdlite.launcher.jobs.outcome import failure_sentence
from tests.launcher.jobs import IMPATIENT, LAUNCHER, RANK, executable, launch
from tests.launcher.mpirun import with_openmpi

each_launcher = pytest.mark.usefixtures("launcher")
ENDED = "; the job has been ended"


def run(
    script: str, *words: str, ranks: int = 3, program: Sequence[str] = LAUNCHER, **variables: str
) -> list[str]:
    """The lines of standard error of a job that fails."""
    flags = ("-np", str(ranks), *words)
    done = launch(*flags, sys.executable, "-c", RANK + script, program=program, **variables)
    assert done.returncode == 1
    return done.stderr.splitlines()


TRAIN = """
import numpy as np, hvdlite.numpy as hvd
hvd.init()
for step in range(1000):
    if rank == 1 and step == 3:
        raise RuntimeError("no more data")
    hvd.allreduce(np.ones(3), name="x")
"""


def test_the_last_line_is_the_cause_and_victims_print_one_line() -> None:
    lines = run(TRAIN)
    assert (
        lines[-1] == f"hvdlite-run: rank 1 failed: RuntimeError: no more data (exit code 1){ENDED}"
    )
    for victim in (0, 2):
        (line,) = (line for line in lines if line.startswith(f"[{victim}]"))
        assert line.startswith(f"[{victim}]<stderr>:HorovodInternalError: ")
        assert "rank 1" in line
        assert line.endswith("(<string>, line 10)")  # where the script called us
    assert "[1]<stderr>:Traceback (most recent call last):" in lines


def test_all_tracebacks_are_printed_for_those_who_debug() -> None:
    assert sum("Traceback" in line for line in run(TRAIN, "--log-level", "debug")) == 3


FORGOTTEN_INIT = {
    "rank": "hvd.rank()",
    "allreduce": "hvd.allreduce(np.ones(3))",
    "async": "hvd.allgather_async(np.ones(3))",
    "broadcast": "hvd.broadcast(np.ones(3), 0)",
    "set": "hvd.add_process_set([0])",
    "raised in turn": "try: hvd.size()\n  except ValueError as error: raise KeyError(1) from error",
}


@pytest.mark.parametrize(
    "call",
    ["allreduce", "raised in turn",
     *(pytest.param(n, marks=pytest.mark.soak) for n in ("rank", "async", "broadcast", "set"))],
)  # fmt: skip
def test_a_forgotten_init_takes_ten_lines_of_the_job_at_most(call: str) -> None:
    """All ranks have forgotten it: the launcher says where, and one rank how it came there."""
    script = f"import numpy as np, hvdlite.numpy as hvd\ndef train():\n  {FORGOTTEN_INIT[call]}\n"
    lines = run(f"{script}train()\n", ranks=4)
    text = "\n".join(lines)
    if call == "raised in turn":  # A mistake of its own, which is shown as any other.
        assert "KeyError: 1" in lines[-1]
        return
    assert len(lines) <= 10, text
    assert "hvdlite has not been initialized; use hvd.init() (<string>, line " in lines[-1]
    own = str(Path(hvdlite.__file__).parent)
    assert not [line for line in lines if own in line], text
    assert {line[:3] for line in lines[:-1]} <= {"[0]"}, text


def test_what_a_victim_raises_in_turn_is_no_cause() -> None:
    script = TRAIN.replace("for step", "try:\n  for step").replace("\n    ", "\n      ")
    script += (
        "except hvd.HorovodInternalError as error:\n  raise ValueError('training') from error\n"
    )
    assert "rank 1 failed: RuntimeError: no more data (exit code 1)" in run(script)[-1]


def test_ranks_that_disagree_show_where() -> None:
    script = (
        "import numpy as np, hvdlite.numpy as hvd\nhvd.init()\nhvd.allreduce(np.ones(2 + rank))"
    )
    lines = run(script, ranks=2)
    assert sum("Traceback" in line for line in lines) == 2
    said = "hvdlite-run: all 2 ranks failed alike: HorovodInternalError: allreduce "
    assert next(line for line in lines if line.startswith("hvdlite-run: ")).startswith(said)
    assert "ranks disagree on shape" in lines[-2]
    assert lines[-1].startswith("hvdlite-run: hint: is the model built alike on all ranks?")


@pytest.mark.parametrize(
    ("collective", "dtype", "shape", "hinted"),
    [
        ("allreduce", "float32", (2, 4), True),
        ("allgather", "float32", (2, 4), True),
        ("point_to_point", "float32", (2, 4), True),
        ("allreduce", "float64", (2, 3), False),
    ],
)
def test_ranks_that_disagree_on_a_shape_get_a_hint(
    collective: str, dtype: str, shape: tuple[int, ...], hinted: bool
) -> None:
    first = Request(0, "x", collective, "float32", (2, 3))
    other = first._replace(dtype=dtype, shape=shape)
    cause = f"HorovodInternalError: {disagreement((0, first), (1, other))}"
    assert "ranks disagree on" in cause
    assert ("drop_last=True" in failure_sentence(Failure(0, 1, cause=cause), {})) == hinted


@each_launcher
def test_an_exception_before_init_is_the_cause() -> None:
    code = "if rank == 1: raise ValueError('a\\nb')\ntime.sleep(600)"
    *lines, last = run(code, ranks=2, program=IMPATIENT)
    assert last == f"hvdlite-run: rank 1 failed: ValueError: a (exit code 1){ENDED}"
    assert "[1]<stderr>:ValueError: a" in lines


@pytest.mark.parametrize(
    ("script", "cause"),
    [
        ("raise SystemExit('stop here')", None),
        ("class Mine(Exception): pass\nraise Mine", "Mine"),
        ("compile('a b', 'x.py', 'exec')", "SyntaxError: invalid syntax"),
        ("import sys\nsys.excepthook = print\nraise KeyError('k')", None),
    ],
)
def test_causes_before_init(script: str, cause: str | None) -> None:
    code = f"if rank == 1:\n  exec({script!r})\ntime.sleep(600)"
    said = f"failed: {cause} (exit code 1)" if cause else "failed with exit code 1"
    last = run(code, ranks=2, program=IMPATIENT)[-1]
    assert last == f"hvdlite-run: rank 1 {said}{ENDED}"


MISSING = "ModuleNotFoundError: No module named "


@pytest.mark.parametrize(
    ("cause", "hint"),
    [
        (f"{MISSING}'horovod.torch'", "--as-horovod"),
        (f"{MISSING}'hvdlite'", sys.executable),
        ("BdbQuit", "--debug-rank"),
        (f"{MISSING}'pandas'", None),
        (f"{MISSING}'hvdlite_plugins'", None),
        (f"{MISSING}'hvdlite.torhc'", None),
        (f"{MISSING}'horovod.mxnet': hvdlite, which answers to the name horovod here, has nothing "
         "like it", None),
    ],
)  # fmt: skip
def test_a_cause_that_is_well_known_gets_a_hint(cause: str, hint: str | None) -> None:
    _, *hints = failure_sentence(Failure(0, 1, cause=cause), {}).splitlines()
    assert len(hints) == (hint is not None)
    assert hint is None or (hints[0].startswith("hvdlite-run: hint: ") and hint in hints[0])


def test_a_script_is_run_by_the_python_of_the_launcher(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print(sys.executable, sys.argv[1:])")
    done = launch("-np", "2", str(script), "--lr", "1")
    assert done.stdout.count(f":{sys.executable} ['--lr', '1']\n") == 2
    executable(script, "echo by itself")
    assert launch("-np", "1", str(script)).stdout == "[0]<stdout>:by itself\n"


# -- hosts

BLOCK = """\
------------------------------------------------------------
A daemon failed to report back after being spawned. This could
be due to several factors, including inability to find the
daemon executable, or the executable was unable to find its

  Local host:    here
  Remote host:   far
  Daemon exit status: 255
"""


@pytest.mark.parametrize("code", [137, 1])
@pytest.mark.parametrize("flags", ["", "--ps-servers 1", "--ps-servers 1 --ps-workers independent"])
def test_a_killed_worker_of_servers_gets_a_hint(code: int, flags: str) -> None:
    options = resolve(make_parser().parse_args(["-np", "2", *flags.split(), "true"]), {})
    sentence = failure_sentence(Failure(1, code), {1: code}, options.cluster)
    hinted = code == 137 and flags == "--ps-servers 1"
    assert ("--ps-workers independent" in sentence) == hinted


@pytest.mark.parametrize(
    ("said", "cause", "remedy"),
    [
        ("Host key verification failed.", "key is not known", "ssh-keyscan far"),
        ("sh: 1: /opt/venv/bin/prted: not found", "not installed", "same path"),
        ("bash: /opt/venv/bin/prted: No such file or directory", "not installed", "same path"),
        ("", "connect back", "--network-interfaces"),
    ],
)
def test_an_unreachable_host_gets_cause_and_remedy(said: str, cause: str, remedy: str) -> None:
    sentence = diagnose([f"{said}\r", *BLOCK.splitlines()])
    assert sentence is not None
    assert sentence.startswith("host far cannot be used: ")
    assert "\n" not in sentence
    assert cause in sentence
    assert remedy in sentence


def test_other_complaints_of_mpirun_stay_its_own() -> None:
    assert diagnose([]) is None
    assert diagnose(["There are not enough slots available in the system"]) is None


@with_openmpi
@pytest.mark.usefixtures("with_mpirun")
def test_a_job_on_a_host_that_is_not_there_ends_with_one_sentence() -> None:
    words = ("-np", "2", "-H", "no-such-host.invalid:2", "true")
    for check in ((), ("--no-check-hosts",)):
        done = launch(*check, *words)
        assert done.returncode not in (0, None)
        assert done.stderr.startswith("hvdlite-run: host no-such-host.invalid cannot be used: ")
        assert done.stderr.count("\n") == 1
    full = launch("--verbose", "--no-check-hosts", *words)
    assert "A daemon failed to report back" in full.stderr


@with_openmpi
@pytest.mark.usefixtures("with_mpirun")
@pytest.mark.parametrize("words", ["--map-by node", "--bind-to core"])
def test_hosts_and_a_placement_of_the_user_go_together(words: str) -> None:
    done = launch("-np", "2", "-H", "localhost:2", f"--mpi-args={words}", "echo", "up")
    assert (done.returncode, done.stdout.count("up")) == (0, 2), done.stderr


def test_a_rank_that_has_fewer_batches_is_told_of_join() -> None:
    script = TRAIN.replace('raise RuntimeError("no more data")', "break")
    *_, cause, hint = run(script, ranks=2)
    assert "rank 0 failed: HorovodInternalError" in cause
    assert hint.startswith("hvdlite-run: hint: rank 1 has ended normally while rank 0 still")
    assert "join()" in hint


def test_a_rank_that_shuts_down_at_the_end_of_its_data_has_ended_normally() -> None:
    script = (
        "import sys, numpy as np, hvdlite.numpy as hvd\n"
        "hvd.init()\n"
        "def train(leave):\n"
        "    for step in range(1000):\n"
        "        if rank == 1 and step == 3: leave()\n"
        "        hvd.allreduce(np.ones(1), name='x')\n"
        "try:\n    train(leave=sys.exit)\nfinally:\n    hvd.shutdown()"
    )
    *_, cause, hint = run(script, ranks=2)
    assert "rank 1 has been shut down" in cause and "SystemExit" not in cause
    assert hint.startswith("hvdlite-run: hint: rank 1 has ended normally while rank 0 still")


@pytest.mark.parametrize(
    ("after", "code", "hinted"),
    [
        ("", 0, True),
        (" after StopIteration (train.py, line 4),", 0, True),
        (" after SystemExit: 3 (train.py, line 4),", 3, False),
        (" after a word with which no sentence goes on", 0, False),
    ],
)
def test_the_hint_to_join_needs_a_rank_that_has_ended_well(
    after: str, code: int, hinted: bool
) -> None:
    cause = f"allreduce 'x': rank 1 has been shut down{after} and cannot take part any more"
    failure = Failure(0, 1, cause=f"HorovodInternalError: {cause} (train.py, line 7)")
    assert ("join()" in failure_sentence(failure, {1: code})) == hinted


def test_a_discovery_script_that_cannot_run_is_an_error_before_the_start(tmp_path: Path) -> None:
    script = tmp_path / "hosts.sh"
    words = ("-np", "1", "--host-discovery-script", str(script), "true")
    done = launch(*words)
    assert (done.returncode, "give the full path" in done.stderr) == (2, True), done.stderr
    script.write_text("#!/bin/sh\necho localhost:1\n")
    done = launch(*words)
    assert (done.returncode, f"chmod +x {script}" in done.stderr) == (2, True), done.stderr
    script.chmod(0o755)
    done = launch(*words)
    assert done.returncode == 0, done.stderr
