"""Who has started a process, by its environment: a table of launchers, rules and contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.connections.address import Address
from hvdlite.common.meeting.detection import PORTS, detect
from hvdlite.common.meeting.launch import WorldRank
from tests.common.meeting.environments import (
    BATCH,
    INDEXED_JOB,
    INTERACTIVE,
    MASTER,
    MPICH,
    NUMBERS,
    OPENMPI,
    OWN,
    SLURM_PMI,
    SRUN,
    TORCHRUN,
)

NODE1 = Address("node1", 29500)
POD = Address("train-0.train", 2222)

# Environment, what MPI says, what torch.distributed says -> source, rank, size, first address.
CASES: dict[str, tuple[dict[str, str], Any, Any, tuple[Any, ...]]] = {
    "nothing": ({"HOME": "/"}, None, None, ("nobody", 0, 1, None)),
    "mpirun": (OPENMPI, None, None, ("MPI", 3, 4, None)),
    "mpiexec of MPICH": (MPICH, None, None, ("MPI", 3, 4, None)),
    "mpirun, and MPI runs": (OPENMPI, (3, 4), None, ("MPI", 3, 4, None)),
    "mpirun of one rank": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, None, None, ("MPI", 0, 1, None),
    ),
    "mpirun under hvdlite-run": ({**OPENMPI, **NUMBERS}, None, None, ("MPI", 3, 4, None)),
    "mpirun with torchrun's variables": ({**OPENMPI, **MASTER}, None, None, ("MPI", 3, 4, None)),
    "mpirun with RANK only": (
        {**OPENMPI, "RANK": "3", "WORLD_SIZE": "4"}, None, None, ("MPI", 3, 4, None),
    ),
    "mpirun inside one task of Slurm": (
        {**SRUN, "SLURM_PROCID": "0", **OPENMPI}, None, None, ("MPI", 3, 4, None),
    ),
    "an unknown launcher of MPI": ({}, (1, 2), None, ("MPI", 1, 2, None)),
    "mpi4py in a script": ({}, (0, 1), None, ("MPI", 0, 1, None)),
    "srun --mpi=pmi2": (SLURM_PMI, None, None, ("MPI", 3, 4, None)),
    "srun --mpi=pmix": ({**SRUN, "PMIX_RANK": "3"}, None, None, ("MPI", 3, -1, None)),
    "hvdlite-run": (OWN, None, None, ("hvdlite", 3, 4, Address(path="/run/hvdlite-1/meeting"))),
    "hvdlite-run, and mpi4py in the script": (
        OWN, (0, 1), None, ("hvdlite", 3, 4, Address(path="/run/hvdlite-1/meeting")),
    ),
    "hvdlite-run, one rank": (
        {**OWN, "HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"}, None, None, ("nobody", 0, 1, None),
    ),
    "hvdlite-run --torchrun-env": (
        {**OWN, **MASTER}, None, None, ("hvdlite", 3, 4, Address(path="/run/hvdlite-1/meeting")),
    ),
    "hvdlite-run inside a task of Slurm": (
        {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **OWN}, None, None,
        ("hvdlite", 3, 4, Address(path="/run/hvdlite-1/meeting")),
    ),
    "hvdlite-run inside a pod of an Indexed Job": (
        {**OWN, "JOB_COMPLETION_INDEX": "0"}, None, None,
        ("hvdlite", 3, 4, Address(path="/run/hvdlite-1/meeting")),
    ),
    "hvdlite-run, and a process group": (
        OWN, None, (3, 4), ("hvdlite", 3, 4, Address(path="/run/hvdlite-1/meeting")),
    ),
    "by hand": (
        {**NUMBERS, "HVDLITE_RENDEZVOUS": "[fe80::1]:22"}, None, None,
        ("hvdlite", 3, 4, Address("fe80::1", 22)),
    ),
    "by hand, with torch's address": ({**NUMBERS, **MASTER}, None, None, ("hvdlite", 3, 4, NODE1)),
    "RANK and WORLD_SIZE with our address": (
        {"RANK": "3", "WORLD_SIZE": "4", "HVDLITE_RENDEZVOUS": "node2:7"}, None, None,
        ("hvdlite", 3, 4, Address("node2", 7)),
    ),
    "Indexed Job": (INDEXED_JOB, None, None, ("hvdlite", 3, 4, POD)),
    "Indexed Job with WORLD_SIZE": (
        {"JOB_COMPLETION_INDEX": "3", "WORLD_SIZE": "4", "HVDLITE_RENDEZVOUS": str(POD)}, None,
        None, ("hvdlite", 3, 4, POD),
    ),
    "an Indexed Job that is no job of ours": (
        {"JOB_COMPLETION_INDEX": "3"}, None, None, ("nobody", 0, 1, None),
    ),
    "torchrun": (TORCHRUN, None, None, ("torchrun", 3, 4, NODE1)),
    "torchrun inside a task of Slurm": (
        {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", **TORCHRUN}, None, None,
        ("torchrun", 3, 4, NODE1),
    ),
    "torchrun of one rank in each of four tasks": (
        {**SRUN, **TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}, None, None, ("nobody", 0, 1, None),
    ),
    "torchrun, and its process group": (TORCHRUN, None, (3, 4), ("torch.distributed", 3, 4, None)),
    "PyTorchJob, TorchDistributor, Accelerate, Lightning": (
        MASTER, None, None, ("MASTER_ADDR", 3, 4, NODE1),
    ),
    "MASTER_ADDR with IPv6": (
        {**MASTER, "MASTER_ADDR": "fd00::1"}, None, None,
        ("MASTER_ADDR", 3, 4, Address("fd00::1", 29500)),
    ),
    "a process group by a file": ({}, None, (1, 2), ("torch.distributed", 1, 2, None)),
    "a process group of one": ({}, None, (0, 1), ("nobody", 0, 1, None)),
    "one rank of torchrun's kind": (
        {"RANK": "0", "WORLD_SIZE": "1"}, None, None, ("nobody", 0, 1, None),
    ),
    "WORLD_SIZE alone": ({"WORLD_SIZE": "4"}, None, None, ("nobody", 0, 1, None)),
    "empty variables": (
        {"RANK": "", "WORLD_SIZE": "", "HVDLITE_RENDEZVOUS": ""}, None, None,
        ("nobody", 0, 1, None),
    ),
    "srun": (SRUN, None, None, ("Slurm", 3, 4, Address("node07", 61440 + (1234 * 16 + 14) % 4080))),
    "srun on one node": (
        {**SRUN, "SLURM_STEP_NUM_NODES": "1"}, None, None,
        ("Slurm", 3, 4, Address("localhost", 61440 + (1234 * 16 + 14) % 4080)),
    ),
    "srun, and mpi4py in the script": (
        SRUN, (0, 1), None,
        ("Slurm", 3, 4, Address("node07", 61440 + (1234 * 16 + 14) % 4080)),
    ),
    "srun with RANK and WORLD_SIZE of Slurm": (
        {**SRUN, "RANK": "3", "WORLD_SIZE": "4"}, None, None,
        ("Slurm", 3, 4, Address("node07", 61440 + (1234 * 16 + 14) % 4080)),
    ),
    "srun with submitit's variables": (
        {**SRUN, **MASTER}, None, None, ("MASTER_ADDR", 3, 4, NODE1),
    ),
    "srun with our address": (
        {**SRUN, "HVDLITE_RENDEZVOUS": "node07:4000"}, None, None,
        ("hvdlite", 3, 4, Address("node07", 4000)),
    ),
    "srun of one task": (
        {**SRUN, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None, None,
        ("nobody", 0, 1, None),
    ),
    "srun of an older Slurm": (
        {name: value for name, value in SRUN.items() if name != "SLURM_STEP_NUM_TASKS"}, None, None,
        ("Slurm", 3, 4, Address("node07", 61440 + (1234 * 16 + 14) % 4080)),
    ),
    "a size of one alone": ({"HVDLITE_SIZE": "1"}, None, None, ("nobody", 0, 1, None)),
    "a batch script": (BATCH, None, None, ("nobody", 0, 1, None)),
    "the shell of salloc": (INTERACTIVE, None, None, ("nobody", 0, 1, None)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_launcher_is_found(case: str) -> None:
    environ, mpi, torch, expected = CASES[case]
    found = detect(environ, mpi and WorldRank(*mpi), torch and WorldRank(*torch))
    first = found.addresses[0] if found.addresses else None
    assert (found.source, found.rank, found.size, first) == expected


# Environment, what torch.distributed says -> what the error says.
ERRORS: dict[str, tuple[dict[str, str], Any, list[str]]] = {
    "MPI and torchrun disagree in rank": (
        {**OPENMPI, **MASTER, "RANK": "1"}, None,
        ["OMPI_COMM_WORLD_RANK=3", "from MPI", "RANK=1 and WORLD_SIZE=4", "from MASTER_ADDR",
         "one of them only"],
    ),
    "MPI and torchrun disagree in size": (
        {**OPENMPI, **TORCHRUN, "WORLD_SIZE": "8"}, None,
        ["OMPI_COMM_WORLD_SIZE=4", "WORLD_SIZE=8", "from torchrun"],
    ),
    "MPI and hvdlite disagree": (
        {**MPICH, **NUMBERS, "HVDLITE_RANK": "0"}, None,
        ["PMI_RANK=3", "from MPI", "HVDLITE_RANK=0", "from hvdlite"],
    ),
    "hvdlite and torchrun disagree": (
        {**OWN, **MASTER, "WORLD_SIZE": "2", "RANK": "1"}, None,
        ["HVDLITE_SIZE=4", "WORLD_SIZE=2"],
    ),
    "hvdlite inside a rank of MPI": (
        {**OPENMPI, "HVDLITE_RANK": "0", "HVDLITE_SIZE": "1"}, None,
        ["OMPI_COMM_WORLD_RANK=3", "HVDLITE_RANK=0"],
    ),
    "the process group and torchrun disagree": (
        TORCHRUN, (1, 2), ["torch.distributed: rank 1 of 2", "RANK=3 and WORLD_SIZE=4"],
    ),
    "no address": (
        {"RANK": "3", "WORLD_SIZE": "4"}, None, ["RANK=3", "MASTER_ADDR and MASTER_PORT"],
    ),
    "half an address": (
        {**MASTER, "MASTER_PORT": ""}, None, ["set MASTER_ADDR and MASTER_PORT"],
    ),
    "a parameter server": (
        {"HVDLITE_ROLE": "server", "HVDLITE_RENDEZVOUS": "unix:/tmp/meeting"}, None,
        ["HVDLITE_ROLE=server: this process is a server", "Call ps.init() first"],
    ),
    "our numbers without an address": (NUMBERS, None, ["set HVDLITE_RENDEZVOUS=host:port"]),
    "an address without a rank": (
        {"HVDLITE_SIZE": "4", "HVDLITE_RENDEZVOUS": "a:1"}, None, ["HVDLITE_RANK"],
    ),
    "an address without a size": (
        {"JOB_COMPLETION_INDEX": "1", "HVDLITE_RENDEZVOUS": "a:1"}, None, ["HVDLITE_SIZE"],
    ),
    "a rank that is no number": ({**MASTER, "RANK": "x"}, None, ["RANK='x'", "whole number"]),
    "a rank that does not exist": ({**MASTER, "RANK": "4"}, None, ["RANK=4", "no such rank"]),
    "no port": ({**MASTER, "MASTER_PORT": "http"}, None, ["MASTER_ADDR:MASTER_PORT='node1:http'"]),
    "an address of no form": (
        {**NUMBERS, "HVDLITE_RENDEZVOUS": "node1"}, None, ["HVDLITE_RENDEZVOUS='node1'"],
    ),
    "a socket without a path": (
        {**NUMBERS, "HVDLITE_RENDEZVOUS": "unix:"}, None, ["HVDLITE_RENDEZVOUS='unix:'"],
    ),
    "a port that cannot be": (
        {**NUMBERS, "HVDLITE_RENDEZVOUS": "node1:70000"}, None,
        ["HVDLITE_RENDEZVOUS='node1:70000'"],
    ),
    "a size alone": ({"HVDLITE_SIZE": "4"}, None, ["HVDLITE_SIZE=4", "HVDLITE_RANK"]),
    "a rank alone": ({"HVDLITE_RANK": "0"}, None, ["HVDLITE_RANK=0", "HVDLITE_SIZE"]),
    "an Indexed Job without an address": (
        {"JOB_COMPLETION_INDEX": "3", "HVDLITE_SIZE": "4"}, None,
        ["HVDLITE_SIZE=4", "JOB_COMPLETION_INDEX=3", "HVDLITE_RENDEZVOUS"],
    ),
    "IPv6 without brackets": ({**NUMBERS, "HVDLITE_RENDEZVOUS": "::1:80"}, None, ["brackets"]),
    "Slurm without nodes": (
        {**SRUN, "SLURM_STEP_NODELIST": ""}, None, ["SLURM_PROCID=3", "SLURM_STEP_NODELIST"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ERRORS)
def test_a_contradiction_names_both_sides(case: str) -> None:
    environ, torch, words = ERRORS[case]
    with pytest.raises(ConfigError) as raised:
        detect(environ, torch=torch and WorldRank(*torch))
    missing = [word for word in words if word not in str(raised.value)]
    assert not missing, raised.value


def test_who_serves() -> None:
    assert detect(MASTER).rank_0_serves and detect(SRUN).rank_0_serves
    assert detect(INDEXED_JOB).rank_0_serves
    assert not detect({**INDEXED_JOB, "HVDLITE_RENDEZVOUS_SERVER": "external"}).rank_0_serves
    assert not detect(OWN).rank_0_serves and not detect(TORCHRUN).rank_0_serves


def test_a_restart_is_told_from_the_start_before_it() -> None:
    first = detect(TORCHRUN)
    again = detect({**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"})
    assert first.incarnation != again.incarnation and first.job != again.job
    own = detect({**INDEXED_JOB, "HVDLITE_INCARNATION": "5"})
    assert own.incarnation == "5" and detect(INDEXED_JOB).incarnation == ""
    assert detect({**SRUN, "SLURM_RESTART_COUNT": "1"}).incarnation == "1"


def test_what_launchers_of_mpi_say_of_the_host() -> None:
    found = detect(OPENMPI)
    assert (found.job, found.local_rank, found.local_size) == ("prterun-a-1@1", 1, 2)
    found = detect({**MPICH, "HVDLITE_LAUNCHER_EVENTS": "token 3 /a b"})
    assert (found.job, found.local_rank, found.local_size) == ("token", 1, 2)
    found = detect({**SLURM_PMI, "SLURM_LOCALID": "0"})
    assert (found.job, found.local_rank, found.local_size) == ("7.0", 0, -1)


def test_srun_is_the_other_way_where_mpi_finds_nobody() -> None:
    by_pmix = detect({**SRUN, "PMIX_RANK": "3"})
    assert by_pmix.instead == detect(SRUN)
    inner = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
    assert detect({**SRUN, **inner}).instead is None  # mpirun -np 1 inside a task
    assert detect(OPENMPI).instead is None


def test_the_ports_of_slurm_are_ports_that_linux_gives_to_nobody() -> None:
    for job in range(0, 1_000_000, 997):
        for step in (0, 1, 77, 5000):
            environ = {**SRUN, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            ports = [address.port for address in detect(environ).addresses]
            assert len(set(ports)) == PORTS
            assert min(ports) > 60999 and max(ports) <= 65535
    following = {**SRUN, "SLURM_JOB_ID": "1235"}
    assert not set(detect(SRUN).addresses) & set(detect(following).addresses)
