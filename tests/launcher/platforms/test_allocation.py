"""The hosts of a job come from the batch system that has started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.platforms.batch_systems import find_allocation

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
