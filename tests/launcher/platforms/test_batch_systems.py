"""Batch systems: the hosts that they give to a job, and how their programs start agents there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.hosts.hosts import parse_hosts
from hvdlite.launcher.platforms.batch_systems import (
    NOISE,
    agents_command,
    agents_environment,
    compute_hosts,
    find_allocation,
    mpi_plugins,
    resource_file,
    without_step,
)

LSF = {"LSB_JOBID": "17"}
SHELL = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_ID": "0",
         "SLURM_NTASKS": "1", "SLURM_JOB_CPUS_PER_NODE": "8,4"}  # fmt: skip
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}


def hosts(environ: dict[str, str]) -> str:
    allocation = find_allocation(environ)
    return "none" if allocation is None else ",".join(map(str, allocation.hosts))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "none"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "2,1"}, "n1:2,n2:1"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "4(x2)"}, "n1:4,n2:4"),
        (SLURM, "n1:1,n2:1"),
        ({"SLURM_JOB_ID": "7", "SLURM_NODELIST": "a"}, "a:1"),
        ({**SLURM, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}, "none"),
        ({**SLURM, "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, "n1:1,n2:1"),
        ({**SHELL, "SLURM_TASKS_PER_NODE": "1"}, "n1:8,n2:4"),
        ({**SHELL, "SLURM_TASKS_PER_NODE": "1", "SLURM_CPUS_PER_TASK": "3"}, "n1:2,n2:1"),
        ({"SLURM_CONF": "/etc/slurm.conf", "SLURM_JOB_NODELIST": "a"}, "none"),
        ({**LSF, "LSB_MCPU_HOSTS": "b1.example.org 2 b2 3 "}, "b1.example.org:2,b2:3"),
        ({**LSF, "LSB_HOSTS": "b1 b1 b2"}, "b1:2,b2:1"),
        ({**LSF, "LSB_HOSTS": "a", "LSB_MCPU_HOSTS": "b 1"}, "b:1"),
        ({**LSF, "LSB_MCPU_HOSTS": "a 1 b 2 a 3"}, "a:4,b:2"),
        ({"LSB_MCPU_HOSTS": "a 1"}, "none"),
        (LSF, "none"),
    ],
)
def test_hosts_that_variables_name(environ: dict[str, str], expected: str) -> None:
    assert hosts(environ) == expected


@pytest.mark.parametrize(
    ("source", "text", "expected"),
    [
        ("LSB_DJOB_HOSTFILE", "b1\nb1\n\nb2\n", "b1:2,b2:1"),
        ("PBS_NODEFILE", "p1\np2\np1\np2\n", "p1:2,p2:2"),
        ("PE_HOSTFILE", "g1 4 all.q@g1 UNDEFINED\ng2 2 all.q@g2 0,1:0,2\n", "g1:4,g2:2"),
        ("PE_HOSTFILE", "g1 1 a.q@g1 UNDEFINED\ng1 2 b.q@g1 UNDEFINED\n", "g1:3"),
    ],
)
def test_hosts_that_a_file_names(tmp_path: Path, source: str, text: str, expected: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    assert hosts({**LSF, source: str(path)}) == expected


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**LSF, "LSB_MCPU_HOSTS": "a 1 b"}, ["LSB_MCPU_HOSTS", "'a 1 b'", "-H"]),
        ({**LSF, "LSB_MCPU_HOSTS": "a none"}, ["LSB_MCPU_HOSTS", "'a none'"]),
        ({**LSF, "LSB_MCPU_HOSTS": "a 0"}, ["LSB_MCPU_HOSTS", "'a 0'"]),
        ({**LSF, "LSB_HOSTS": " "}, ["LSB_HOSTS", "names no host", "-H"]),
        ({"PBS_NODEFILE": "/nonexistent/nodes"}, ["PBS_NODEFILE", "/nonexistent/nodes", "-H"]),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "1(x3)"}, ["2 nodes", "n[1-2]", "1(x3)", "3", "-H"]),
        ({**SLURM, "SLURM_JOB_NODELIST": "n[1"}, ["'n[1'"]),
    ],
)
def test_what_is_not_understood_is_named(environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        find_allocation(environ)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("hosts", "expected"),
    [
        ("batch5:1,h1:42,h2:42", "h1:42,h2:42"),
        ("h1:42,h2:42", "h1:42,h2:42"),
        ("h1:1,h2:1", "h1:1,h2:1"),
        ("h1:1", "h1:1"),
        ("h1:1,h2:42,h3:1", "h1:1,h2:42,h3:1"),
    ],
)
def test_the_launch_node_is_no_host_of_ranks(hosts: str, expected: str) -> None:
    assert ",".join(map(str, compute_hosts(parse_hosts(hosts)))) == expected


@pytest.mark.parametrize(("threads", "last"), [(1, (3, 1)), (4, (15, 7))])
def test_a_file_of_resources(threads: int, last: tuple[int, int]) -> None:
    """One agent on each host has all processors of the job there."""
    assert resource_file(parse_hosts("h1:4,h2:2"), threads) == (
        "overlapping_rs: allow\n"
        "cpu_index_using: logical\n"
        "\n"
        f"rank: 0: {{ hostname: h1; cpu: {{0-{last[0]}}} ; gpu: * ; mem: * }}\n"
        f"rank: 1: {{ hostname: h2; cpu: {{0-{last[1]}}} ; gpu: * ; mem: * }}\n"
    )


# What sbatch sets with --ntasks=3 --cpus-per-task=2 --gpus-per-task=1 --distribution=cyclic.
JOB = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4,2", "SLURM_SUBMIT_DIR": "/home/a", "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_CONF": "/etc/slurm/slurm.conf", "SLURM_CLUSTER_NAME": "c", "PATH": "/usr/bin",
}  # fmt: skip
SHAPE = {
    "SLURM_NTASKS": "3", "SLURM_NPROCS": "3", "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2,1", "SLURM_CPUS_PER_TASK": "2", "SRUN_CPUS_PER_TASK": "2",
    "SLURM_GPUS_PER_TASK": "1", "SLURM_TRES_PER_TASK": "cpu:2", "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_CPU_BIND": "cores", "SLURM_MEM_PER_CPU": "1000", "SLURM_EXPORT_ENV": "NONE",
    "SLURM_MPI_TYPE": "pmix",
}  # fmt: skip
STEP = {
    "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1", "SLURM_GTIDS": "1", "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}  # fmt: skip


def test_one_agent_is_started_on_each_node() -> None:
    command = agents_command("/usr/bin/srun", ["n1", "n2"], ["--qos=a"], ["python", "agent"])
    assert command[0] == "/usr/bin/srun"
    assert command[-2:] == ["python", "agent"]
    flags = dict(word.partition("=")[::2] for word in command[1:-2])
    assert (flags["--nodes"], flags["--ntasks"], flags["--ntasks-per-node"]) == ("2", "2", "1")
    assert (flags["--nodelist"], flags["--qos"]) == ("n1,n2", "a")
    assert "--overlap" in flags  # or it waits for the step that the launcher itself may be in


def test_the_shape_of_the_job_does_not_shape_the_step() -> None:
    assert agents_environment({**JOB, **SHAPE}) == JOB
    assert agents_environment({**JOB, **STEP}).keys() - JOB.keys() == {
        "SLURM_SRUN_COMM_HOST", "SLURM_LAUNCH_NODE_IPADDR",
    }  # fmt: skip


def test_ranks_see_the_job_and_not_the_step_of_their_agent() -> None:
    assert without_step({**JOB, **STEP}) == JOB
    assert without_step({"SLURM_CPUS_PER_TASK": "2"}) == {"SLURM_CPUS_PER_TASK": "2"}


def test_the_plugins_that_srun_lists() -> None:
    new = (
        "MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\n"
        "specific pmix plugin versions available: pmix_v4\n"
    )
    old = "srun: MPI types are...\nsrun: none\nsrun: pmi2\n"
    assert mpi_plugins(new) == {"pmix", "none", "pmi2"}
    assert mpi_plugins(old) == {"none", "pmi2"}
    assert mpi_plugins("") == frozenset()


def test_noise_is_told_from_errors() -> None:
    text = "srun: cluster configuration lacks support for cpu binding\nsrun: error: x\n"
    assert re.sub(NOISE, "", text) == "srun: error: x\n"
