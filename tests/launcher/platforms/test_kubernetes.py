"""The launcher pod of an MPIJob or TrainJob: its hostfile is found, and its workers waited for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.flags import parse_args
from hvdlite.launcher.command_line.options import LaunchOptions, resolve
from hvdlite.launcher.hosts.hosts import Host
from hvdlite.launcher.jobs.passed_variables import names_for_other_hosts
from hvdlite.launcher.mpirun.commands import Place, build_command, build_environment
from hvdlite.launcher.platforms.kubernetes import (
    find_launcher_pod,
    listed,
    names_without_address,
    with_own_pod_local,
)
from hvdlite.launcher.processes.signals import SignalInbox
from tests.launcher.jobs import launch, start
from tests.launcher.mpirun.test_commands import MPICH, OMPI4, OMPI5
from tests.limits import HANG_SECONDS

# What the operators set in a launcher pod, for each value of mpiImplementation.
OPENMPI_POD = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    "OMPI_MCA_orte_set_default_slots": "2",
    "NVIDIA_VISIBLE_DEVICES": "",
    "NVIDIA_DRIVER_CAPABILITIES": "",
}
TRAINER_POD = {name: text for name, text in OPENMPI_POD.items() if name.startswith("OMPI_")}
INTEL_POD = {
    "K_MPI_JOB_ROLE": "launcher",
    "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
    "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
    "I_MPI_PERHOST": "2",
}
MPICH_POD = {
    "K_MPI_JOB_ROLE": "launcher",
    "HYDRA_HOST_FILE": "/etc/mpi/hostfile",
    "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10",
}
PODS = [OPENMPI_POD, TRAINER_POD, INTEL_POD, MPICH_POD]
SSH_ARGS = ("-o", "ConnectionAttempts=10")


@pytest.mark.parametrize("environ", PODS, ids=["openmpi", "trainer", "intel", "mpich"])
def test_the_variables_of_each_operator_lead_to_its_hostfile(environ: dict[str, str]) -> None:
    pod = find_launcher_pod(environ, {"/etc/mpi/hostfile"}.__contains__)
    assert pod is not None
    assert (pod.hostfile, pod.ssh_args) == ("/etc/mpi/hostfile", SSH_ARGS)
    assert environ[pod.source] == "/etc/mpi/hostfile"


def test_the_role_alone_leads_to_the_mounted_hostfile() -> None:
    mounted = {"/etc/mpi/hostfile"}.__contains__
    pod = find_launcher_pod({"K_MPI_JOB_ROLE": "launcher"}, mounted)
    assert pod is not None
    assert (pod.hostfile, pod.source, pod.ssh_args) == ("/etc/mpi/hostfile", "K_MPI_JOB_ROLE", ())


@pytest.mark.parametrize(
    ("environ", "files"),
    [
        ({}, {"/etc/mpi/hostfile"}),  # a pod of another job that mounts such a file
        ({"K_MPI_JOB_ROLE": "worker"}, {"/etc/mpi/hostfile"}),
        ({"K_MPI_JOB_ROLE": "launcher"}, set()),
        (OPENMPI_POD, set()),  # the variables without the file
        ({"OMPI_MCA_orte_default_hostfile": ""}, {""}),
        ({"OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10"}, {"/etc/mpi/hostfile"}),
    ],
)
def test_other_processes_are_no_launcher_pod(
    environ: dict[str, str], files: Collection[str]
) -> None:
    assert find_launcher_pod(environ, files.__contains__) is None


def test_an_empty_hostfile_and_a_folder_name_no_hosts(tmp_path: Path) -> None:
    (tmp_path / "hostfile").touch()
    for path in (tmp_path / "hostfile", tmp_path, tmp_path / "none"):
        assert find_launcher_pod({"HYDRA_HOST_FILE": str(path)}) is None


def test_a_bad_variable_is_named() -> None:
    environ = {**OPENMPI_POD, "OMPI_MCA_plm_rsh_args": "-o 'open"}
    with pytest.raises(ConfigError, match=r"^OMPI_MCA_plm_rsh_args=.*open"):
        find_launcher_pod(environ, lambda path: True)


# -- what becomes of it

WORKERS = (Host("train-worker-0.train.default.svc", 2), Host("train-worker-1.train.default.svc", 2))
HOSTFILES = {
    "openmpi": "".join(f"{host.name} slots=2\n" for host in WORKERS),
    "intel": "".join(f"{host.name}:2\n" for host in WORKERS),
}


def in_pod(folder: Path, form: str, *words: str, environ: dict[str, str]) -> LaunchOptions:
    path = folder / "hostfile"
    path.write_text(HOSTFILES[form])
    moved = {k: str(path) if v == "/etc/mpi/hostfile" else v for k, v in environ.items()}
    return resolve(parse_args([*words, "--", "python", "train.py"]), moved)


@pytest.mark.parametrize(
    ("environ", "form"), [*zip(PODS, ["openmpi", "openmpi", "intel", "intel"], strict=True)]
)
def test_ranks_run_on_the_workers(tmp_path: Path, environ: dict[str, str], form: str) -> None:
    options = in_pod(tmp_path, form, environ=environ)
    assert options.hosts == WORKERS
    assert options.num_proc == 4
    assert in_pod(tmp_path, form, "-np", "3", environ=environ).counts == (2, 1)


def test_hosts_that_are_given_win(tmp_path: Path) -> None:
    options = in_pod(tmp_path, "openmpi", "-H", "localhost:3", environ=OPENMPI_POD)
    assert (options.hosts, options.launcher_pod, options.ssh_args) == (
        (Host("localhost", 3),),
        None,
        (),
    )
    own = tmp_path / "own"
    own.write_text("a slots=1\n")
    given = in_pod(tmp_path, "openmpi", "--hostfile", str(own), environ=OPENMPI_POD)
    assert given.hosts == (Host("a", 1),)


def test_a_bad_hostfile_is_named_with_its_variable(tmp_path: Path) -> None:
    path = tmp_path / "hostfile"
    path.write_text("# no host\n")
    with pytest.raises(ConfigError, match=rf"^HYDRA_HOST_FILE: {path} names no host"):
        resolve(parse_args(["python", "train.py"]), {"HYDRA_HOST_FILE": str(path)})


def test_arguments_of_ssh_reach_each_mpi(tmp_path: Path) -> None:
    options = in_pod(tmp_path, "openmpi", "--ssh-port=2222", environ=OPENMPI_POD)
    wanted = "-p 2222 -o ConnectionAttempts=10"
    place = Place(root=False, names=())
    for mpi, flags in ((OMPI5, ("--prtemca", "plm_ssh_args")), (OMPI4, ("--mca", "plm_rsh_args"))):
        words = build_command(mpi, options, place, ["x"])
        at = next(n for n, word in enumerate(words) if word.startswith(wanted))
        assert tuple(words[at - 2 : at]) == flags
    assert build_environment(MPICH, options)["HYDRA_LAUNCHER_EXTRA_ARGS"].startswith(wanted)


def test_what_describes_the_launcher_pod_is_not_for_the_workers() -> None:
    assert set(names_for_other_hosts({**OPENMPI_POD, "MINE": "1"})) & {
        "K_MPI_JOB_ROLE", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "MINE"
    } == {"MINE"}  # fmt: skip


def test_a_launcher_that_is_a_worker_runs_its_ranks_itself() -> None:
    hosts = (Host("train-launcher.train.default.svc", 2), *WORKERS)
    assert with_own_pod_local(hosts, "train-launcher") == (Host("localhost", 2), *WORKERS)
    assert with_own_pod_local(hosts, "train-launch") == hosts
    assert with_own_pod_local(WORKERS, "train") == WORKERS


# -- names that have no address yet


def test_a_name_that_resolves_later_is_waited_for() -> None:
    asked: list[str] = []

    def resolver(name: str) -> bool:
        asked.append(name)
        return name == "first" or asked.count(name) == 3

    with SignalInbox() as signals:
        assert names_without_address(["first", "later"], 60, signals, resolver) == []
    assert asked == ["first", "later", "later", "later"]  # who has an address is not asked again


def test_names_without_address_are_told_after_the_time_limit() -> None:
    with SignalInbox() as signals:
        missing = names_without_address(["a", "b"], 0.2, signals, lambda name: name == "a")
    assert missing == ["b"]


def test_a_signal_ends_the_waiting() -> None:
    with SignalInbox() as signals:
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM))
        timer.start()
        began = time.monotonic()
        assert names_without_address(["a"], 100, signals, lambda name: False) == ["a"]
        assert signals.received == signal.SIGTERM
        timer.join()
    assert time.monotonic() - began < 50


def test_of_many_names_some_are_listed() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([f"w{n}" for n in range(9)]) == "w0, w1, w2, w3, w4, w5 and 3 more"


# -- the command line


NO_NAME = "w" * 64 + ".train.default.svc"  # too long a part, so that no server is asked for it


@pytest.fixture
def hostfile(tmp_path: Path) -> Path:
    path = tmp_path / "hostfile"
    path.write_text(f"{NO_NAME} slots=2\n")
    return path


def test_pods_that_never_come_are_named(hostfile: Path) -> None:
    done = launch(
        "--start-timeout", "1", "true", OMPI_MCA_orte_default_hostfile=str(hostfile), timeout=60
    )
    assert done.returncode == 1
    assert f"2 ranks on the hosts of {hostfile}" in done.stderr
    assert "1 of 1 hosts have no address after 1 seconds (--start-timeout): " in done.stderr
    assert f"{NO_NAME}. Remedy: see with kubectl get pods" in done.stderr


def test_a_launcher_pod_that_is_deleted_while_it_waits_ends(hostfile: Path) -> None:
    with start("true", OMPI_MCA_orte_default_hostfile=str(hostfile)) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "waiting up to" in line:
                break
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.endswith("hvdlite-run: ended by SIGTERM\n")
