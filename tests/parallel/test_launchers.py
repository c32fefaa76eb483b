"""Ranks that others than hvdlite have started: torchrun, Slurm, Kubernetes, a user by hand."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.forks import NUMPY, TORCH, forks
from tests.limits import patient
from tests.parallel.jobs import MPIRUN, NO_MPIRUN, environment
from tests.ports import free_port

LIMIT_SECONDS = patient(60)
# mpi4py cannot be imported, as where no MPI is installed.
PROLOGUE = """
import os, sys, time
class NoMpi:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mpi4py":
            raise ImportError("there is no mpi4py")
sys.meta_path.insert(0, NoMpi())
import numpy as np
import hvdlite.numpy as hvd
def check(size, name="check"):
    assert hvd.size() == size
    total = hvd.allreduce(np.full(3, hvd.rank() + 1.0), name=name, op=hvd.Sum)
    assert total.tolist() == [size * (size + 1) / 2] * 3, total
def done():
    assert "mpi4py" not in sys.modules
    os.write(1, f"rank {hvd.rank()} of {hvd.size()} done\\n".encode())
"""
SCRIPT = PROLOGUE + "hvd.init(); check(int(os.environ['EXPECTED'])); done()\n"
Variables = Mapping[str, str]
Starter = Callable[[int], list[dict[str, str]]]


def start(
    environments: Sequence[Variables], script: str, preload: Sequence[str] = NUMPY
) -> list[tuple[int, str]]:
    """Start a process with each of these environments; their exit codes and outputs."""
    popen = forks(*preload) if preload else subprocess.Popen
    processes = [
        popen(
            [sys.executable, "-c", script],
            env=environment(**{"EXPECTED": str(len(environments)), **variables}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for variables in environments
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


def by_master(size: int, **others: str) -> list[dict[str, str]]:
    """The variables of PyTorchJob, TorchDistributor, Accelerate and Lightning."""
    port = str(free_port())
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    return [{"RANK": str(rank), **common, **others} for rank in range(size)]


def by_slurm(size: int) -> list[dict[str, str]]:
    """The variables of ``srun -n SIZE`` on one node, with a job that no other test has."""
    common = {
        "SLURM_JOB_ID": str(os.getpid() * 1000 + int(time.monotonic()) % 1000),
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "n1",
        "SLURM_NTASKS": str(size),
    }
    return [{"SLURM_PROCID": str(r), "SLURM_LOCALID": str(r), **common} for r in range(size)]


def by_indexed_job(size: int) -> list[dict[str, str]]:
    common = {"HVDLITE_SIZE": str(size), "HVDLITE_RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    return [{"JOB_COMPLETION_INDEX": str(rank), **common} for rank in range(size)]


def by_hand(size: int) -> list[dict[str, str]]:
    """The variables that hvdlite's own launchers set."""
    common = {"HVDLITE_SIZE": str(size), "HVDLITE_RENDEZVOUS": f"127.0.0.1:{free_port()}"}
    return [{"HVDLITE_RANK": str(rank), **common} for rank in range(size)]


@pytest.mark.parametrize("starter", [by_master, by_slurm, by_indexed_job])
def test_ranks_become_one_job_without_mpi(starter: Starter) -> None:
    ended = start(starter(4), SCRIPT)
    assert [code for code, _ in ended] == [0] * 4, ended
    for rank, (_, output) in enumerate(ended):
        assert f"rank {rank} of 4 done" in output


def test_one_rank_needs_no_address() -> None:
    ((code, output),) = start([{"RANK": "0", "WORLD_SIZE": "1"}], SCRIPT)
    assert (code, output) == (0, "rank 0 of 1 done\n")


def test_two_jobs_of_slurm_with_the_same_ports_find_their_own() -> None:
    first, second = by_slurm(2), by_slurm(2)
    for variables in second:  # the ports of this job are the same, as jobs are counted modulo 4080
        variables["SLURM_JOB_ID"] = str(int(first[0]["SLURM_JOB_ID"]) + 4080)
    for variables in (*first, *second):
        variables["EXPECTED"] = "2"
    ended = start([*first, *second], SCRIPT)
    assert [code for code, _ in ended] == [0] * 4, ended


def test_rank_0_may_come_last_and_init_works_again() -> None:
    script = (
        PROLOGUE
        + """
time.sleep(1.0 * (os.environ["RANK"] == "0"))  # the others look for it meanwhile
for _ in range(5):
    hvd.init(); check(3); hvd.shutdown()
hvd.init(comm=[0, 2] if os.environ["RANK"] != "1" else [1])
check(2 if hvd.size() == 2 else 1); hvd.shutdown()
hvd.init(); check(3); done()
"""
    )
    ended = start(by_master(3), script)
    assert [code for code, _ in ended] == [0] * 3, ended


def test_a_rank_that_never_comes_is_named_by_all() -> None:
    ended = start(by_master(3, HVDLITE_START_TIMEOUT="2")[:2], SCRIPT)
    for code, output in ended:
        assert code == 1 and "these ranks did not come: 2 (seen: 0, 1)" in output, output


def test_a_rank_with_another_size_is_told_and_named_to_the_others() -> None:
    environments = by_master(2, HVDLITE_START_TIMEOUT="3")
    environments[1]["WORLD_SIZE"] = "5"
    ended = start(environments, SCRIPT)
    assert "rank 1 counts 5 ranks in the job" in ended[1][1], ended
    assert "did not come: 1 (seen: 0); rank 1 counts 5 ranks" in ended[0][1], ended


def test_a_rank_of_another_protocol_is_told() -> None:
    script = (
        PROLOGUE
        + """
from hvdlite.common.connections import prove
other = prove.OURS.protocol + int(os.environ["RANK"])
prove.OURS = prove.OURS._replace(protocol=other)
hvd.init()
"""
    )
    ended = start(by_master(2, HVDLITE_START_TIMEOUT="3"), script)
    for code, output in ended:
        assert code == 1 and "install one version of hvdlite for all ranks" in output, ended
        assert "is installed here, but another rank runs" in output, ended


def test_a_port_that_another_program_has_is_named() -> None:
    environments = by_master(2, HVDLITE_START_TIMEOUT="5", MASTER_ADDR="127.0.0.1")
    port = int(environments[0]["MASTER_PORT"])
    script = (
        PROLOGUE
        + f"""
import socket
blocker = socket.create_server(("127.0.0.1", {port})) if os.environ["RANK"] == "0" else None
hvd.init()
"""
    )
    ended = start(environments[:1], script)
    assert f"rank 0 cannot listen at 127.0.0.1:{port}" in ended[0][1], ended
    assert "Address already in use. Choose a free port" in ended[0][1], ended
    assert "or is this a second process with RANK=0 and WORLD_SIZE=2?" in ended[0][1], ended


@pytest.mark.parametrize(
    "setting", ["HVDLITE_ALLREDUCE", "HVDLITE_DATA_PLANE", "HVDLITE_TRANSPORT"]
)
def test_a_setting_that_needs_mpi_is_refused(setting: str) -> None:
    for code, output in start(by_master(2, **{setting: "mpi"}), SCRIPT):
        assert code == 1 and f"{setting}=mpi needs MPI" in output, output
        assert "hvdlite-run --launcher mpirun" in output, output


def test_two_launchers_that_disagree_are_named() -> None:
    environments = by_master(2, HVDLITE_RANK="0", HVDLITE_SIZE="4")
    for code, output in start(environments, SCRIPT):
        assert code == 1 and "two launchers disagree" in output and "HVDLITE_SIZE=4" in output


@pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN)
@pytest.mark.parametrize("starter", [by_hand, by_master])
def test_a_communicator_of_one_rank_is_no_job_of_one_rank(starter: Starter) -> None:
    """MPI knows of one process only, where it has not started the ranks.

    COMM_SELF says that this is meant; any other communicator is that of a script for mpirun, and
    would become as many jobs as there are ranks.
    """
    script = """
import os
from mpi4py import MPI
import numpy as np
import hvdlite.numpy as hvd
names = ("HVDLITE_RANK", "HVDLITE_SIZE", "RANK", "WORLD_SIZE")
given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
for comm in (MPI.COMM_WORLD, MPI.COMM_WORLD.Dup(), MPI.COMM_SELF.Split(0)):
    assert comm.size == 1
    try:
        hvd.init(comm=comm)
    except ValueError as error:
        assert "has 2 ranks" in str(error) and "--launcher mpirun" in str(error), error
        assert all(each in str(error) for each in given) and len(given) == 2, error
    else:
        raise AssertionError("it has become a job of its own")
    assert not hvd.is_initialized()
def total(name):
    return hvd.allreduce(np.ones(3), name=name, op=hvd.Sum).tolist()
hvd.init(comm=MPI.COMM_SELF)
assert (hvd.rank(), hvd.size(), total("alone")) == (0, 1, [1.0] * 3)
hvd.shutdown()
hvd.init()
assert total("together") == [2.0] * 3
os.write(1, f"rank {hvd.rank()} of {hvd.size()} done\\n".encode())
"""
    ended = start(starter(2), script, preload=())
    for rank, (code, output) in enumerate(ended):
        assert code == 0 and f"rank {rank} of 2 done" in output, ended


def test_a_spawned_child_of_a_rank_is_no_rank() -> None:
    script = (
        PROLOGUE
        + """
import subprocess
hvd.init(); check(2)
if hvd.rank() == 1:
    child = subprocess.run([sys.executable, "-c", "import hvdlite.numpy as h; h.init()"],
                           capture_output=True, text=True, timeout=30)
    assert child.returncode == 1 and "was started by rank 1" in child.stderr, child
check(2, "after"); done()
"""
    )
    for starter in (by_master, by_slurm):
        ended = start(starter(2), script)
        assert [code for code, _ in ended] == [0] * 2, ended


# -- torchrun

BESIDE_TORCH = (
    PROLOGUE
    + """
import torch, torch.distributed as dist
def check_torch():
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert ones.tolist() == [dist.get_world_size()] * 3
size = int(os.environ["WORLD_SIZE"])
if os.environ["WHEN"] == "before":
    dist.init_process_group("gloo"); check_torch()
for _ in range(3):
    hvd.init(); check(size); hvd.shutdown()
if os.environ["WHEN"] == "after":
    dist.init_process_group("gloo"); check_torch()
hvd.init(); check(size, "again")
hvd.shutdown()
hvd.init(comm=[int(os.environ["RANK"])]); check(1); hvd.shutdown()
if size > 2:
    part = [0, 1] if int(os.environ["RANK"]) < 2 else [3, 2]
    hvd.init(comm=part); check(2); hvd.shutdown()
hvd.init(); check(size, "last")
check_torch(); dist.destroy_process_group()
done()
"""
)


@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.soak)])
def test_a_process_group_beside_hvdlite_at_the_same_port(when: str) -> None:
    """Nobody listens at MASTER_PORT: rank 0 does for the meeting, and torch does later."""
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    ended = start(by_master(2, WHEN=when), BESIDE_TORCH, TORCH)
    assert [code for code, _ in ended] == [0] * 2, ended


def test_torchrun_on_two_nodes(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the extra 'torch' is not installed")
    end = f"localhost:{free_port()}"
    (tmp_path / "train.py").write_text(BESIDE_TORCH)
    flags = ["--nnodes", "2", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "7"]
    words = [*flags, "--rdzv-endpoint", end, str(tmp_path / "train.py")]
    command = [sys.executable, "-m", "torch.distributed.run", *words]
    nodes = [
        subprocess.Popen(command, env=environment(WHEN="after"), stdout=subprocess.PIPE, text=True,
                         stderr=subprocess.STDOUT, start_new_session=True)
        for _ in range(2)
    ]  # fmt: skip
    try:
        outputs = [node.communicate(timeout=220)[0] for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert "".join(outputs).count(" of 4 done") == 4, outputs
