"""Agents that srun or jsrun starts, here by programs that stand in for them on this host."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.settings.config import Config
from hvdlite.launcher.agents.group_agents import make_group, threads_per_core
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.launcher_choice import JSRUN, MPIRUN, SRUN, SSH, choose_launcher
from hvdlite.launcher.command_line.options import resolve
from hvdlite.launcher.platforms.batch_systems import find_allocation
from tests.launcher.jobs import MARK, launch, processes, start, wait_until_up
from tests.launcher.mpirun.test_commands import options

# Starts the agent once for each line of the file of resources, and notes what it was given.
JSRUN_PROGRAM = """#!{python}
import os, re, subprocess, sys
assert sys.argv[1] == "--erf_input"
text = open(sys.argv[2]).read()
open({notes!r}, "w").write(text + " ".join(sys.argv))
ranks = re.findall(r"^rank: (\\d+): ", text, re.M)
started = [
    subprocess.Popen(sys.argv[3:], env={{**os.environ, "JSM_NAMESPACE_RANK": rank}})
    for rank in ranks
]
sys.exit(max(each.wait() for each in started))
"""
# Starts the agent once for each node, but none on a node called "broken". Its tasks end before it
# does, as those of srun.
SRUN_PROGRAM = """#!{python}
import os, signal, subprocess, sys
nodes = [word.partition("=")[2] for word in sys.argv if word.startswith("--nodelist=")][0]
agent = [word for word in sys.argv[1:] if not word.startswith("--")]
started = []
signal.signal(signal.SIGTERM, lambda *_: [each.terminate() for each in started])
for task, node in enumerate(nodes.split(",")):
    if node == "broken":
        text = "slurmstepd: error: execve(): python: No such file or directory\\n"
        sys.stderr.write(text + f"srun: error: {{node}}: task {{task}}: Exited with exit code 2\\n")
        sys.stderr.flush()
        continue
    mine = {{**os.environ, "SLURMD_NODENAME": node, "SLURM_PROCID": str(task),
            "SLURM_GTIDS": "0", "SLURM_NTASKS": "2"}}
    started.append(subprocess.Popen(agent, env=mine))
sys.exit(max(each.wait() for each in started))
"""
SAY = ["sh", "-c", "echo $HVDLITE_RANK of $HVDLITE_SIZE, $HVDLITE_LOCAL_RANK at $HVDLITE_HOST_NAME"]
LSF = {"LSB_JOBID": "7", "LSB_MCPU_HOSTS": "batch 1 h1 2 h2 2"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_TASKS_PER_NODE": "2,1"}


def install(folder: Path, name: str, text: str) -> str:
    """Write a program; returns a PATH in which it is the first."""
    program = folder / name
    program.write_text(text.format(python=sys.executable, notes=str(folder / "notes")))
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_ranks_run_on_the_compute_nodes_of_lsf(tmp_path: Path) -> None:
    """On all of their slots, as nothing else is said."""
    path = install(tmp_path, "jsrun", JSRUN_PROGRAM)
    done = launch(*SAY, PATH=path, **LSF)
    assert done.returncode == 0, done.stderr
    assert "4 ranks on LSF's h1:2,h2:2" in done.stderr
    assert sorted(done.stdout.splitlines()) == [
        "[0]<stdout>:0 of 4, 0 at h1", "[1]<stdout>:1 of 4, 1 at h1",
        "[2]<stdout>:2 of 4, 0 at h2", "[3]<stdout>:3 of 4, 1 at h2",
    ]  # fmt: skip
    for flags in ("--jsrun", "--launcher jsrun"):
        given = resolve(parse_args([*flags.split(), "-np", "3", "true"]), {"PATH": path, **LSF})
        assert (given.launcher, given.counts) == (JSRUN, (2, 1))
    notes = (tmp_path / "notes").read_text()
    width = 2 * threads_per_core() - 1
    for rank, host in enumerate(("h1", "h2")):
        wanted = f"rank: {rank}: {{ hostname: {host}; cpu: {{0-{width}}} ; gpu: * ; mem: * }}"
        assert wanted in notes
    assert "batch" not in notes


def test_ranks_under_srun_do_not_see_the_step_of_their_agent(tmp_path: Path) -> None:
    path = install(tmp_path, "srun", SRUN_PROGRAM)
    done = launch("env", PATH=path, **SLURM, SLURM_CPUS_PER_TASK="2")
    assert done.returncode == 0, done.stderr
    names = {line.partition(":")[2].partition("=")[0] for line in done.stdout.splitlines()}
    assert {"SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_CPUS_PER_TASK", "HVDLITE_RANK"} <= names
    assert not {name for name in names if name.startswith("HVDLITE_LAUNCHER_NAMED")}
    assert not names & {"SLURM_GTIDS", "SLURM_TASKS_PER_NODE", "SLURM_STEP_ID"}
    said = [line.partition(":")[2] for line in done.stdout.splitlines()]
    assert sorted(line for line in said if line.startswith("SLURM_PROCID")) == [
        f"SLURM_PROCID={rank}" for rank in range(3)
    ]  # in the words of Slurm, too, a rank is told its own place
    assert said.count("SLURM_NTASKS=3") == 3


@pytest.mark.parametrize("program", ["srun", "jsrun"])
def test_the_secret_is_not_on_the_command_line(tmp_path: Path, program: str) -> None:
    text = "#!/bin/sh\ncat /proc/$$/cmdline >&2; echo SECRET $HVDLITE_LAUNCHER_SECRET >&2; exit 9\n"
    path = install(tmp_path, program, text)
    done = launch("--verbose", "true", PATH=path, **(SLURM if program == "srun" else LSF))
    secret = done.stderr.rpartition("SECRET ")[2].split(".")[0]
    assert len(secret) == 32
    assert done.stderr.count(secret) == 1


def test_a_node_without_an_agent_ends_the_start_by_its_name(tmp_path: Path) -> None:
    path = install(tmp_path, "srun", SRUN_PROGRAM)
    broken = {**SLURM, "SLURM_JOB_NODELIST": "n1,broken"}
    done = launch("--start-timeout", "60", "sleep", "50", PATH=path, timeout=20, **broken)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "cannot be used" in line]
    assert "host broken" in line
    assert "task 1: Exited with exit code 2" in line
    assert "Remedy: make the same Python environment" in line


def test_what_the_program_says_is_the_cause(tmp_path: Path) -> None:
    text = (
        "#!/bin/sh\n"
        "echo 'srun: cluster configuration lacks support for cpu binding' >&2\n"
        "echo 'srun: error: Unable to create step for job 7: Job/step already completing' >&2\n"
        "exit 1\n"
    )
    done = launch("true", PATH=install(tmp_path, "srun", text), **SLURM)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "cannot be used" in line]
    assert "Unable to create step for job 7" in line
    assert "cpu binding" not in done.stderr


def test_a_program_that_hangs_is_given_up(tmp_path: Path) -> None:
    text = "#!/bin/sh\nexec sleep 60\n"
    path = install(tmp_path, "srun", text)
    done = launch("--start-timeout", "1", "true", PATH=path, timeout=20, **SLURM)
    assert done.returncode == 1
    assert "3 of 3 ranks" in done.stderr
    assert "after 1 seconds" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_launcher_leaves_nothing(tmp_path: Path, number: int) -> None:
    path = install(tmp_path, "jsrun", JSRUN_PROGRAM)
    words = ("-np", "3", "sh", "-c", "echo up; sleep 60")
    with start(*words, PATH=path, **LSF) as process:
        environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
        (mark,) = [text.decode() for text in environ if text.startswith(MARK.encode())]
        wait_until_up(process, 3)
        process.send_signal(number)
        process.wait(timeout=20)
        deadline = time.monotonic() + (10 if number == signal.SIGKILL else 0)
        while processes(mark.partition("=")[2]) and time.monotonic() < deadline:
            time.sleep(0.05)
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)


# -- what is chosen


def program_path(folder: Path, *names: str) -> str:
    for name in names:
        (folder / name).write_text("")
        (folder / name).chmod(0o755)
    return str(folder)


def choose(environ: dict[str, str], **given: str) -> str:
    config = Config.from_environ({f"HVDLITE_{name.upper()}": text for name, text in given.items()})
    return choose_launcher(config, {}, find_allocation(environ), environ)


def test_the_allocation_chooses_the_starter(tmp_path: Path) -> None:
    path = {"PATH": program_path(tmp_path, "srun", "jsrun")}
    none = {"PATH": "/nonexistent"}
    task = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert choose({**path, **SLURM}) == SRUN
    assert choose({**path, **LSF}) == JSRUN
    others = [{**none, **SLURM}, {**none, **LSF}, {**path, **SLURM, **task}, path]
    assert [choose(environ) for environ in others] == [SSH] * 4
    assert choose({**path, **SLURM}, allreduce="mpi") == MPIRUN
    assert choose({**path, **LSF}, launcher="mpirun") == MPIRUN


@pytest.mark.parametrize(
    ("launcher", "environ"), [("srun", {}), ("srun", LSF), ("jsrun", {}), ("jsrun", SLURM)]
)
def test_a_starter_without_its_allocation_is_refused(
    tmp_path: Path, launcher: str, environ: dict[str, str]
) -> None:
    path = program_path(tmp_path, "srun", "jsrun")
    with pytest.raises(ConfigError, match=f"--launcher {launcher} needs"):
        choose({"PATH": path, **environ}, launcher=launcher)


def test_a_program_that_has_gone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no srun in PATH"):
        make_group(SRUN, ["a"], options(), {"PATH": str(tmp_path)})


@pytest.mark.parametrize(
    ("text", "threads"), [("0-3\n", 4), ("0,48\n", 2), ("0\n", 1), ("0-1,8-9\n", 4), ("", 1)]
)
def test_threads_of_a_core(tmp_path: Path, text: str, threads: int) -> None:
    (tmp_path / "list").write_text(text)
    assert threads_per_core(tmp_path / "list") == threads
    assert threads_per_core(tmp_path / "missing") == 1
