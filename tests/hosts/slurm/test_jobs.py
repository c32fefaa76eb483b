"""Jobs under real Slurm: sbatch, salloc, srun, and hvdlite.run in an allocation."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time

import pytest

from tests.hosts.lab import SHARED
from tests.hosts.slurm.cluster import Cluster, wait_until
from tests.hosts.slurm.programs import VICTIM, Place, expected, places
from tests.parallel.jobs import MPIRUN, NO_MPIRUN

PROGRAM = [sys.executable, "-m", "tests.hosts.slurm.programs"]
LAUNCHER = [sys.executable, "-m", "hvdlite.launcher"]
FOUR = ("-N2", "--ntasks-per-node=2")
FUNCTION = """
import hvdlite
from tests.hosts.slurm.programs import places

def where(a, b):
    import socket
    import hvdlite.numpy as hvd
    hvd.init()
    result = hvd.rank(), hvd.size(), hvd.cross_size(), socket.gethostname(), a + b
    hvd.shutdown()
    return result

if __name__ == "__main__":
    print(hvdlite.run(where, args=(1,), kwargs={"b": 2}, np=3))
"""


def succeed(done: subprocess.CompletedProcess[str]) -> list[Place]:
    """Check that a command went well; returns the places of its ranks."""
    assert done.returncode == 0, done.stdout + done.stderr
    return places(done.stdout)


BOTH, ONE_EACH = [("nodeb", 2), ("nodec", 2)], [("nodeb", 1), ("nodec", 1)]
# The login host, where salloc runs hvdlite-run, gets no rank.
COMMANDS: dict[str, tuple[list[str], list[tuple[str, int]]]] = {
    "srun, without mpi": (["srun", *FOUR], BOTH),
    "srun with uneven tasks": (["srun", "-N2", "-n3"], [("nodeb", 2), ("nodec", 1)]),
    "srun with one task": (["srun", "-n1"], [("nodeb", 1)]),
    "salloc": (["salloc", *FOUR, *LAUNCHER], BOTH),
    "salloc without a number of tasks": (["salloc", "-N2", *LAUNCHER], ONE_EACH),
    # An interactive shell, or a script.
    "a shell on a node may use all": (["salloc", *FOUR, "srun", "-N1", "-n1", *LAUNCHER], BOTH),
    **{
        f"{n} ranks of 4 tasks": (["salloc", *FOUR, *LAUNCHER, "-np", str(n)], hosts)
        for n, hosts in enumerate([[("nodeb", 1)], [("nodeb", 2)], [("nodeb", 2), ("nodec", 1)]], 1)
    },
}


@pytest.mark.parametrize("name", COMMANDS)
def test_ranks_are_where_tasks_are(slurm: Cluster, name: str) -> None:
    command, hosts = COMMANDS[name]
    assert succeed(slurm.run(*command, *PROGRAM, "place")) == expected(*hosts)


# -- srun starts the ranks


def test_srun_that_deals_ranks_out_in_turn(slurm: Cluster) -> None:
    done = slurm.run("srun", *FOUR, "--distribution=cyclic", *PROGRAM, "place")
    assert [(each.rank, each.local_rank, each.host, each.total) for each in succeed(done)] == [
        (0, 0, "nodeb", 10), (1, 0, "nodec", 10), (2, 1, "nodeb", 10), (3, 1, "nodec", 10),
    ]  # fmt: skip


def test_steps_at_the_same_time_are_jobs_of_their_own(slurm: Cluster) -> None:
    program = " ".join(PROGRAM)
    step = f"srun --exact -N2 -n2 {program} place & "
    done = slurm.run("salloc", *FOUR, "sh", "-c", f"{step * 2} wait")
    one = expected(("nodeb", 1), ("nodec", 1))
    assert succeed(done) == sorted(one * 2)


def test_steps_that_share_everything(slurm: Cluster) -> None:
    """Two jobs with the same nodes, tasks and moment: only the step tells them apart."""
    program = " ".join(PROGRAM)
    step = f"srun --overlap -N2 -n4 {program} place & "
    done = slurm.run("salloc", *FOUR, "sh", "-c", f"{step * 3} wait")
    assert succeed(done) == sorted(expected(("nodeb", 2), ("nodec", 2)) * 3)


def test_a_job_array(slurm: Cluster) -> None:
    code, _ = slurm.batch(
        "--array=0-1", "-N2", "-n2", lines=f"srun {' '.join(PROGRAM)} place", output="array-%a.out"
    )
    written = [slurm.read(f"array-{task}.out") for task in (0, 1)]
    assert [places(text) for text in written] == [expected(("nodeb", 1), ("nodec", 1))] * 2
    assert code == 0


def test_torchrun_inside_a_step(slurm: Cluster) -> None:
    """The tasks are torchrun's agents; the ranks are those that torchrun starts."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2",
             "--rdzv-backend=c10d", "--rdzv-endpoint=nodeb:29511", "--rdzv-id=1"]  # fmt: skip
    done = slurm.run("srun", "-N2", "-n2", *agent, "-m", *PROGRAM[2:], "place")
    found = succeed(done)
    assert [each.rank for each in found] == [0, 1, 2, 3]
    assert {each.total for each in found} == {10}


def test_a_pmi_that_the_ranks_do_not_need_does_no_harm(slurm: Cluster) -> None:
    done = slurm.run("srun", "--mpi=pmi2", "-N2", "-n2", *PROGRAM, "place")
    assert [each[:-1] for each in succeed(done)] == [
        each[:-1] for each in expected(("nodeb", 1), ("nodec", 1))
    ]


# -- hvdlite-run starts them


def test_a_batch_script_with_hvdlite_run(slurm: Cluster) -> None:
    code, written = slurm.batch(*FOUR, lines=" ".join([*LAUNCHER, *PROGRAM, "place"]))
    assert code == 0, written
    assert places(written) == expected(("nodeb", 2), ("nodec", 2))


def test_more_ranks_than_tasks_are_refused(slurm: Cluster) -> None:
    done = slurm.run("salloc", *FOUR, *LAUNCHER, "-np", "5", *PROGRAM, "place")
    assert done.returncode == 2
    assert "-np 5 asks for more ranks than the 4 slots of the hosts nodeb:2,nodec:2" in done.stderr


def test_two_launchers_at_the_same_time(slurm: Cluster) -> None:
    launch = " ".join([*LAUNCHER, "-np", "2", *PROGRAM, "place"])
    done = slurm.run("salloc", *FOUR, "sh", "-c", f"{launch} & {launch} & wait")
    assert succeed(done) == sorted(expected(("nodeb", 2)) * 2)


@pytest.mark.parametrize("launcher", ["auto", "mpirun"])
def test_a_launcher_inside_each_task_starts_ranks_beside_itself(
    slurm: Cluster, launcher: str
) -> None:
    mpi = launcher == "mpirun"
    if mpi and MPIRUN is None:
        pytest.skip(NO_MPIRUN)
    flags = ("--launcher", launcher, "-np", "2")
    done = slurm.run("srun", "-N2", "-n2", *LAUNCHER, *flags, *PROGRAM, "place")
    hosts = [place for node in ("nodeb", "nodec") for place in expected((node, 2), mpi=mpi)]
    assert succeed(done) == sorted(hosts)


def test_a_rank_uses_the_cpus_of_its_job_and_knows_its_place_in_words_of_slurm(
    slurm: Cluster,
) -> None:
    say = ["sh", "-c", "echo :$OMP_NUM_THREADS $SLURM_PROCID/$SLURM_NTASKS $SLURM_STEP_ID"]
    done = slurm.run("salloc", "-N2", "--ntasks-per-node=1", *LAUNCHER, *say)
    assert done.returncode == 0, done.stderr
    said = sorted(line.rpartition(":")[2].strip() for line in done.stdout.splitlines())
    assert said == ["1 0/2", "1 1/2"]


@pytest.mark.parametrize("launcher", ["auto", "mpirun"])
def test_a_function_on_several_nodes(slurm: Cluster, launcher: str) -> None:
    """Each host has a /tmp of its own, and the function cannot be imported there.

    Agents carry the call; for mpirun it lies in the working directory, which the hosts share.
    """
    if launcher == "mpirun" and MPIRUN is None:
        pytest.skip(NO_MPIRUN)
    script = slurm.lab.write("function.py", FUNCTION)
    done = slurm.run("salloc", *FOUR, sys.executable, script, HVDLITE_LAUNCHER=launcher)
    assert done.returncode == 0, done.stdout + done.stderr
    expect = [(0, 3, 2, "nodeb", 3), (1, 3, 1, "nodeb", 3), (2, 3, 2, "nodec", 3)]
    assert done.stdout.splitlines()[-1] == str(expect)


# -- how jobs end


@pytest.mark.parametrize(
    ("how", "code", "sentence"),
    [
        ("exit", 7, f"rank {VICTIM} failed with exit code 7; the job has been ended"),
        ("kill", 137, f"rank {VICTIM} was killed by SIGKILL"),
        ("raise", 1, f"rank {VICTIM} failed: ValueError: the batch is empty (exit code 1)"),
    ],
)
def test_a_failure_on_the_second_node(slurm: Cluster, how: str, code: int, sentence: str) -> None:
    done = slurm.run("salloc", *FOUR, *LAUNCHER, *PROGRAM, how)
    assert (done.returncode, sentence in done.stderr) == (code, True), done.stderr
    if how == "raise":  # In whole lines.
        rank = rf"\[{VICTIM}\]<stderr>:"
        own = [line for line in done.stderr.splitlines() if re.match(rank, line)]
        text = [line.partition(":")[2] for line in own]
        assert text[0] == "Traceback (most recent call last):", done.stderr
        assert text[-1] == "ValueError: the batch is empty"
        assert '    raise ValueError("the batch is empty")' in text


@pytest.mark.parametrize("starter", ["launcher", "srun"])
def test_a_cancelled_job_leaves_nothing(slurm: Cluster, starter: str) -> None:
    front = LAUNCHER if starter == "launcher" else ["srun"]
    script = slurm.lab.write(
        "cancel.sh", f"#!/bin/sh\nexec {shlex.join([*front, *PROGRAM, 'run'])}\n"
    )
    output = f"cancel-{starter}.out"
    slurm.run("sbatch", *FOUR, f"--output={SHARED / output}", script)
    runs = [f"rank {rank} runs" for rank in range(4)]
    wait_until(
        lambda: all(line in slurm.read(output) for line in runs), "the ranks",
        lambda: slurm.read(output),
    )  # fmt: skip
    started = time.monotonic()
    slurm.cancel()
    wait_until(lambda: slurm.left() == {}, "the end of all processes", lambda: str(slurm.left()))
    assert time.monotonic() - started < 15


def test_nothing_is_left_on_the_hosts(slurm: Cluster) -> None:
    """Sockets, call directories and shared memory of the jobs before this test are gone."""
    for host in slurm.lab.nodes:
        done = slurm.run("sh", "-c", "ls -A /tmp /dev/shm", host=host)
        assert [name for name in done.stdout.split() if "hvdlite" in name] == [], host
