"""The step of agents: its command line, and the variables that go in and come out."""

from __future__ import annotations

import re

from hvdlite.launcher.platforms.batch_systems import (
    NOISE,
    agents_command,
    agents_environment,
    mpi_plugins,
    without_step,
)

# What sbatch sets with --ntasks=3 --cpus-per-task=2 --gpus-per-task=1 --distribution=cyclic.
JOB = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_CPUS_PER_NODE": "4,2",
    "SLURM_SUBMIT_DIR": "/home/a",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_CONF": "/etc/slurm/slurm.conf",
    "SLURM_CLUSTER_NAME": "c",
    "PATH": "/usr/bin",
}
SHAPE = {
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_CPUS_PER_TASK": "2",
    "SRUN_CPUS_PER_TASK": "2",
    "SLURM_GPUS_PER_TASK": "1",
    "SLURM_TRES_PER_TASK": "cpu:2",
    "SLURM_DISTRIBUTION": "cyclic",
    "SLURM_CPU_BIND": "cores",
    "SLURM_MEM_PER_CPU": "1000",
    "SLURM_EXPORT_ENV": "NONE",
    "SLURM_MPI_TYPE": "pmix",
}
STEP = {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
    "SLURM_GTIDS": "1",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}


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
