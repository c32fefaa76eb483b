"""Pods of a TrainJob with a torch policy, each of which starts its own ranks, without torchrun."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.options import LaunchOptions, resolve
from tests.launcher.jobs import start
from tests.launcher.other_hosts import python
from tests.limits import HANG_SECONDS
from tests.ports import free_port

# As Trainer 2 sets them in the pods of a runtime with a torch policy.
POD = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "2",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}


def options(*words: str, **changed: str) -> LaunchOptions:
    return resolve(parse_args([*words, "--", "python", "train.py"]), {**POD, **changed})


def test_a_pod_starts_its_own_ranks_of_the_job() -> None:
    found = options(PET_NPROC_PER_NODE="4")
    assert (list(found.ranks), found.size, found.num_proc) == ([4, 5, 6, 7], 8, 4)
    assert found.torch_pod is not None
    assert str(found.torch_pod.master) == "train-node-0-0.train:29500"
    assert options("-np", "2").torch_pod == options().torch_pod
    assert str(options(PET_MASTER_ADDR="fd00::1").torch_pod.master) == "[fd00::1]:29500"  # type: ignore[union-attr]


def test_where_trainer_says_nothing_else_the_job_is_that_of_this_pod() -> None:
    for found in (
        options("-H", "localhost:3", PET_NPROC_PER_NODE="auto"),
        options("-np", "3", PET_NODE_RANK=""),
        options("-np", "3", PET_NNODES="1", PET_NODE_RANK="0"),
    ):
        assert (found.torch_pod, list(found.ranks), found.size) == (None, [0, 1, 2], 3)


@pytest.mark.parametrize(
    ("words", "changed", "said"),
    [
        ((), {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE='auto': .*needs a number"),
        ((), {"PET_NNODES": "1:4"}, "PET_NNODES='1:4': .*needs a number"),
        ((), {"PET_NODE_RANK": "2"}, "PET_NODE_RANK=2 .*are no place"),
        ((), {"PET_MASTER_PORT": ""}, "not both of PET_MASTER_ADDR and PET_MASTER_PORT"),
        (("-np", "3"), {}, "-np 3 contradicts PET_NPROC_PER_NODE=2: .*numProcPerNode"),
        (("--launcher", "mpirun"), {}, "--launcher mpirun: .*leave out"),
    ],
)
def test_what_cannot_be(words: tuple[str, ...], changed: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        options(*words, **changed)


SCRIPT = """
import numpy as np, hvdlite.numpy as hvd
hvd.init()
total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), op=hvd.Sum)
place = (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())
torch = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
print("at", *place, *total.tolist(), *torch)
"""


@pytest.mark.timeout(180)
@pytest.mark.parametrize("secret", ["5ec2e7", pytest.param("", marks=pytest.mark.soak)])
def test_the_ranks_of_two_pods_meet(tmp_path: Path, secret: str) -> None:
    """Two launchers, which know nothing of each other, on this host."""
    port = str(free_port())
    both = {**POD, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    if secret:
        both["HVDLITE_SECRET"] = secret
    logs = ("--output-filename", str(tmp_path / "logs"))
    with contextlib.ExitStack() as stack:
        pods = []
        for index in ("1", "0"):
            words = (*logs, "--torchrun-env", *python(SCRIPT))
            pods.append(stack.enter_context(start(*words, **{**both, "PET_NODE_RANK": index})))
        printed = [pod.communicate(timeout=HANG_SECONDS) for pod in pods]
    lines = sorted(line for out, _ in printed for line in out.splitlines())
    assert lines == [
        f"[{rank}]<stdout>:at {rank} 4 {rank} 4 10.0 10.0 10.0 {rank} 4 127.0.0.1 {port}"
        for rank in range(4)
    ], printed
    assert [pod.returncode for pod in pods] == [0, 0]
    assert "ranks 2 to 3 of 4" in printed[0][1]
    assert sorted(os.listdir(tmp_path / "logs")) == [f"rank.{rank}" for rank in range(4)]


def test_the_rank_that_fails_is_named_by_its_number_in_the_job() -> None:
    with start(*python("sys.exit(7 * (rank == 3))"), **POD) as pod:
        _, err = pod.communicate(timeout=HANG_SECONDS)
    assert pod.returncode == 7
    assert "rank 3 failed with exit code 7" in err
