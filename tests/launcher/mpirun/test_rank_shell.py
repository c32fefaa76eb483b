"""What the shell around a rank tells it: its place in the job, and how many threads it may use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdlite.launcher.hosts.resources import cores, count_cores_script
from hvdlite.launcher.jobs.environment import LOOPBACK, first_host
from hvdlite.launcher.mpirun import rank_shell
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI, SLURM
from hvdlite.launcher.mpirun.rank_shell import RankShell
from tests.forks import TORCH
from tests.launcher.jobs import executable, launch
from tests.launcher.mpirun.test_commands import options

NAMES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")


def told(kind: str, environ: dict[str, str], **given: Any) -> dict[str, str]:
    """The environment of a rank of an MPI that has set `environ`."""
    given = {"token": "t", "directory": "/nonexistent", "ranks": 5, "kind": kind, **given}
    done = subprocess.run(
        RankShell(**given).wrap(["env"]), env={"PATH": os.environ["PATH"], **environ},
        capture_output=True, text=True, timeout=20, check=True,
    )  # fmt: skip
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def place(environ: dict[str, str], prefix: str = "HVDLITE") -> list[int | None]:
    values = (environ.get(f"{prefix}_{name}") for name in NAMES)
    return [None if value is None else int(value) for value in values]


def openmpi(rank: int, local_rank: int, local_size: int) -> dict[str, str]:
    numbers = {"RANK": rank, "SIZE": 5, "LOCAL_RANK": local_rank, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in numbers.items()}


# Hosts with 2, 1 and 2 ranks: rank, size, local rank, local size, cross rank, cross size.
PLACES = [
    (0, 5, 0, 2, 0, 3),
    (1, 5, 1, 2, 0, 2),
    (2, 5, 0, 1, 1, 3),
    (3, 5, 0, 2, 2, 3),
    (4, 5, 1, 2, 1, 2),
]


@pytest.mark.parametrize("expected", PLACES, ids=lambda expected: expected[0])
def test_a_rank_knows_its_place(expected: tuple[int, ...]) -> None:
    rank, _, local_rank, local_size, _, _ = expected
    mine = told(OPENMPI, openmpi(rank, local_rank, local_size), counts=(2, 1, 2))
    assert place(mine) == [*expected]
    hydra = {"PMI_RANK": str(rank), "PMI_SIZE": "5"}
    assert place(told(HYDRA, hydra, counts=(2, 1, 2))) == [*expected]
    slurm = {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": "5",
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str((0, 0, 1, 2, 2)[rank]),
        "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
    }
    assert place(told(SLURM, slurm)) == [*expected]
    even = told(SLURM, slurm | {"SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_LOCALID": "0"})
    assert even["HVDLITE_CROSS_SIZE"] == "3"
    assert even["HVDLITE_LOCAL_SIZE"] == "2"


def test_what_nobody_knows_is_left_out() -> None:
    for counts in ((), (3, 2)):  # the user places the ranks; the MPI has done so in its own way
        assert place(told(OPENMPI, openmpi(2, 0, 1), counts=counts)) == [2, 5, 0, 1, None, None]


def test_under_the_alias_horovods_variables_are_there_too() -> None:
    mine = openmpi(1, 1, 5)
    both = told(OPENMPI, mine, counts=(5,), prefixes=("HVDLITE", "HOROVOD"))
    assert place(both, "HOROVOD") == place(both) == [1, 5, 1, 5, 0, 1]
    alone = told(OPENMPI, mine, counts=(5,))
    assert place(alone, "HOROVOD") == [None] * 6
    assert "RANK" not in alone
    assert "WORLD_SIZE" not in alone


def test_torchruns_variables_are_there_when_they_are_wanted() -> None:
    mine = told(OPENMPI, openmpi(3, 1, 2), torchrun=True)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    assert [mine[name] for name in names] == ["3", "5", "1", "2"]


def test_the_first_host_of_a_slurm_job() -> None:
    alone = options(num_proc=3)
    nodes = {"SLURM_JOB_NUM_NODES": "3", "SLURM_JOB_NODELIST": "node[03-05]-ib"}
    assert first_host(alone, nodes) == "node03-ib"
    assert first_host(alone, {**nodes, "SLURM_JOB_NUM_NODES": "1"}) == LOOPBACK


# -- threads


def system(root: Path, group: str, **files: str) -> Path:
    """A folder that looks like ``/``; `files` are those of control groups, by path."""
    (root / "proc" / "self").mkdir(parents=True)
    (root / "proc" / "self" / "cgroup").write_text(group)
    for name, text in files.items():
        path = root / "sys" / "fs" / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 64),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "250000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("0::/a/b\n", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "200000 100000\n"}, 2),
        ("0::/gone\n", {"cpu.max": "400000 100000\n"}, 4),
        ("5:memory:/x\n4:cpu,cpuacct:/x\n",
         {"cpu/x/cpu.cfs_quota_us": "300000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 3),
        ("4:cpu,cpuacct:/\n",
         {"cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "1\n"}, 64),
        ("4:cpu,cpuacct:/docker/1\n",
         {"cpu,cpuacct/cpu.cfs_quota_us": "500000\n",
          "cpu,cpuacct/cpu.cfs_period_us": "100000\n"}, 5),
        ("", {}, 64),
    ],
)  # fmt: skip
def test_the_limit_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str],
    expected: int,
) -> None:  # fmt: skip
    (tmp_path / "bin").mkdir()
    executable(tmp_path / "bin" / "nproc", "echo 64")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    root = str(system(tmp_path / "root", group, **files))
    assert cores(root) == expected
    monkeypatch.setattr(rank_shell, "count_cores_script", lambda: count_cores_script(root))
    path = {"PATH": os.environ["PATH"]}

    def threads(**given: Any) -> int:
        return int(told(OPENMPI, {**openmpi(0, 0, 2), **path}, **given)["OMP_NUM_THREADS"])

    assert threads(counts=(2,)) == max(1, expected // 2)
    bound = threads(counts=(2,), bound=True)  # nproc says what this rank alone may use
    assert bound == (32 if expected == 64 else max(1, expected // 2))


def test_cores_are_those_of_the_affinity_mask_at_most() -> None:
    script = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    script += "from hvdlite.launcher.hosts.resources import cores; print(cores())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert done.stdout == b"1\n"
    assert 1 <= cores() <= len(os.sched_getaffinity(0))


def test_threads_that_the_user_has_set_stay() -> None:
    mine = told(OPENMPI, {**openmpi(0, 0, 2), "OMP_NUM_THREADS": "77"}, counts=(2,))
    assert mine["OMP_NUM_THREADS"] == "77"


# -- in a job

TOGETHER = """
import types, torch, torch.distributed as dist
import hvdlite.torch as hvd
hvd.init()
if not hasattr(torch._dynamo, "trace_rules"):  # As in the process that ranks are forked from.
    torch._dynamo.trace_rules = types.SimpleNamespace(clear_lru_cache=lambda: None)
dist.init_process_group("gloo")
assert (dist.get_rank(), dist.get_world_size()) == (hvd.rank(), hvd.size())
mine = torch.tensor([1.0 + hvd.rank()])
theirs = mine.clone()
dist.all_reduce(theirs)
assert theirs.item() == hvd.allreduce(mine, op=hvd.Sum).item() == 3.0
print("together")
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("launcher")
def test_a_script_uses_torch_distributed_beside_hvdlite() -> None:
    pytest.importorskip("torch")
    words = ("--torchrun-env", "-np", "2", sys.executable, "-c", TOGETHER)
    done = launch(*words, forked=TORCH, may_leave="torch*")
    assert (done.returncode, done.stdout.count("together")) == (0, 2), done.stderr
