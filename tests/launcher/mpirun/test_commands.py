"""The command line of each MPI, word for word."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.command_line.options import LaunchOptions
from hvdlite.launcher.hosts.hosts import parse_hosts
from hvdlite.launcher.jobs.environment import rank_environment
from hvdlite.launcher.jobs.passed_variables import names_for_other_hosts
from hvdlite.launcher.mpirun.commands import Place, build_command, build_environment
from hvdlite.launcher.mpirun.mpi import HYDRA, OPENMPI, SLURM, Mpi, find_mpi, identify
from tests.launcher.jobs import executable

OMPI5 = Mpi(OPENMPI, "/opt/mpirun", "Open MPI 5.0.8", 5)
OMPI4 = Mpi(OPENMPI, "/usr/bin/mpirun", "Open MPI 4.1.6", 4)
MPICH = Mpi(HYDRA, "/opt/mpiexec", "MPICH 4.3.0", 4)
SRUN = Mpi(SLURM, "/usr/bin/srun", "Slurm's srun", 0)
USER = Place(root=False, names=("PATH", "LANG"), token="t")


def options(**given: Any) -> LaunchOptions:
    return LaunchOptions(**{"command": ("true",), "num_proc": 4, "variables": {},
                      "start_timeout_seconds": 30.0, **given})  # fmt: skip


def command(mpi: Mpi, place: Place = USER, **given: Any) -> str:
    return " ".join(build_command(mpi, options(**given), place, ["CMD"]))


def test_open_mpi_5_on_this_host() -> None:
    assert command(OMPI5) == (
        "/opt/mpirun -np 4 --oversubscribe --with-ft ulfm --output tag --bind-to none CMD"
    )
    assert "--allow-run-as-root" in command(OMPI5, Place(root=True, names=()))


def test_open_mpi_4_has_other_words_for_it() -> None:
    assert command(OMPI4) == (
        "/usr/bin/mpirun -np 4 --oversubscribe --mca orte_abort_on_non_zero_status 0 --tag-output "
        "--bind-to none CMD"
    )


def test_open_mpi_on_several_hosts() -> None:
    given = {
        "hosts": parse_hosts("a:2,b:2"),
        "ssh_port": 2222,
        "ssh_identity_file": "/my key",
        "network_interfaces": ("eth0", "eth1"),
    }
    assert command(OMPI5, **given) == (
        "/opt/mpirun -np 4 --oversubscribe --with-ft ulfm --output tag --bind-to none "
        "--host a:2,b:2 --map-by slot --mca btl_tcp_if_include eth0,eth1 "
        "--prtemca prte_if_include eth0 --prtemca plm_ssh_args "
        "-p 2222 -i '/my key' -o ServerAliveInterval=3 -o ServerAliveCountMax=3 "
        "-x PATH -x LANG CMD"
    )
    assert "--mca plm_rsh_args -p 2222" in command(OMPI4, **given)
    assert "--mca oob_tcp_if_include eth0,eth1" in command(OMPI4, **given)


def test_the_daemons_of_open_mpi_5_get_no_subnet_and_at_most_one_name() -> None:
    hosts = parse_hosts("a:2,b:2")
    words = command(OMPI5, hosts=hosts, network_interfaces=("10.0.0.0/24", "eth1", "eth2"))
    assert "--mca btl_tcp_if_include 10.0.0.0/24,eth1,eth2 --prtemca prte_if_include eth1 " in words
    assert "prte" not in command(OMPI5, hosts=hosts, network_interfaces=("10.0.0.0/24",))


def test_open_mpi_on_very_many_hosts() -> None:
    hosts = parse_hosts(",".join(f"h{number}:1" for number in range(64)))
    words = command(OMPI5, hosts=hosts)
    assert "--prtemca plm_ssh_no_tree_spawn 1 --prtemca plm_ssh_num_concurrent 64" in words


def test_users_arguments_come_last_and_binding_is_theirs() -> None:
    given = {"mpi_args": ("--mca", "x", "1"), "binding_args": ("--bind-to", "socket")}
    assert command(OMPI5, **given).endswith("--bind-to socket --mca x 1 CMD")
    assert "--bind-to none" not in command(OMPI5, **given)


@pytest.mark.parametrize("mpi", [OMPI5, OMPI4])
def test_a_placement_of_the_user_is_the_only_one(mpi: Mpi) -> None:
    hosts = parse_hosts("a:2,b:2")
    for words in (
        ("--map-by", "node"),
        ("--map-by=node",),
        ("-npernode", "2"),
        ("--rankfile", "f"),
    ):
        told = command(mpi, hosts=hosts, mpi_args=words)
        assert "--map-by slot" not in told
        assert told.endswith(" ".join((*words, "CMD")))
        assert "--bind-to none" in told
    bound = command(mpi, hosts=hosts, mpi_args=("--bind-to", "core"))
    assert bound.count("--bind-to") == 1
    assert "--map-by slot" in bound
    assert command(SRUN, mpi_args=("--cpu-bind=cores",)).count("--cpu-bind") == 1


def test_mpich() -> None:
    assert command(MPICH) == (
        "/opt/mpiexec -np 4 -disable-auto-cleanup -prepend-pattern [t.%r]  CMD"
    )
    words = command(MPICH, hosts=parse_hosts("a:2,b:2"), network_interfaces=("eth0",))
    assert words.endswith("-hosts a:2,b:2 -iface eth0 CMD")
    with pytest.raises(ConfigError, match="--network-interfaces"):
        command(MPICH, network_interfaces=("eth0", "eth1"))


def test_srun() -> None:
    assert command(SRUN) == (
        "/usr/bin/srun --ntasks 4 --label --unbuffered --export=ALL --kill-on-bad-exit=0 "
        "--mpi=pmix --cpu-bind=none CMD"
    )
    assert "--mpi=pmi2" in command(Mpi(SLURM, "srun", "srun", 0, library=HYDRA))
    own = command(SRUN, mpi_args=("--mpi=cray_shasta",))
    assert own.endswith("--mpi=cray_shasta CMD")
    assert "pmix" not in own
    with pytest.raises(ConfigError, match="--ssh-port"):
        command(SRUN, ssh_port=22)


def test_variables_that_an_mpi_reads() -> None:
    assert build_environment(OMPI5, options()) == {}
    assert build_environment(MPICH, options()) == {}
    ssh = build_environment(MPICH, options(ssh_port=22))
    assert ssh == {"HYDRA_LAUNCHER_EXTRA_ARGS": "-p 22"}
    assert build_environment(MPICH, options(tcp=True))["FI_PROVIDER"] == "tcp"
    assert build_environment(OMPI5, options(tcp=True))["OMPI_MCA_pml"] == "ob1"


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", OPENMPI, "Open MPI 5.0.11"),
        ("mpirun (Open MPI) 4.1.2", OPENMPI, "Open MPI 4.1.2"),
        ("HYDRA build details:\n    Version:         5.0.2\n    Release", HYDRA, "MPICH 5.0.2"),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.13 Build", HYDRA, "Intel MPI 2021.13"),
    ],
)
def test_an_mpi_is_known_by_its_version(text: str, kind: str, name: str) -> None:
    mpi = identify("/bin/mpirun", text)
    assert mpi is not None
    assert (mpi.kind, mpi.name, mpi.program) == (kind, name, "/bin/mpirun")


def test_another_program_is_no_mpi() -> None:
    assert identify("/bin/mpirun", "usage: mpirun") is None


def test_srun_is_used_in_an_allocation_unless_hosts_are_given(tmp_path: Any) -> None:
    for name, text in (("srun", ""), ("mpirun", "mpirun (Open MPI) 4.1.2")):
        executable(tmp_path / name, f"echo '{text}'")
    environ = {"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}
    assert find_mpi(environ, hosts_given=False).kind == SLURM
    assert find_mpi(environ, hosts_given=True).kind != SLURM
    for plugins, kind in (("none pmi2", OPENMPI), ("none pmix", SLURM)):
        lines = "\n".join(plugins.split())
        (tmp_path / "srun").write_text(f"#!/bin/sh\necho 'MPI plugin types are...\n{lines}'\n")
        assert find_mpi(environ, hosts_given=False).kind == kind
    # As Slurm of Debian says it without the library that its plugin loads.
    with (tmp_path / "srun").open("a") as script:
        script.write("test $1 = --mpi=list || echo \"srun: error: Invalid MPI type 'pmix'\" >&2\n")
    assert find_mpi(environ, hosts_given=False).kind == OPENMPI
    task = {**environ, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    assert find_mpi(task, hosts_given=False).kind != SLURM
    assert find_mpi({"PATH": str(tmp_path)}, hosts_given=False).kind != SLURM


def test_the_environment_is_passed_on_less_what_belongs_to_another_job() -> None:
    environ = {
        "PATH": "/bin", "HOME": "/home/me", "MY_TOKEN": "x", "HVDLITE_CYCLE_TIME": "1",
        "OMPI_MCA_pml": "ob1", "BASH_FUNC_module%%": "() { :; }", "OLDPWD": "/",
        "_HOROVOD_SECRET_KEY": "k", "PMIX_RANK": "3", "PMI_SIZE": "4", "OMPI_COMM_WORLD_RANK": "3",
        "HVDLITE_LAUNCHER_EVENTS": "t 0 /x", "HVDLITE_CROSS_RANK": "1", "HOROVOD_RANK": "3",
    }  # fmt: skip
    passed = rank_environment(environ, OMPI5, options(variables={"HVDLITE_CYCLE_TIME": "2"}))
    assert passed == {
        "PATH": "/bin",
        "HOME": "/home/me",
        "MY_TOKEN": "x",
        "HVDLITE_CYCLE_TIME": "2",
        "OMPI_MCA_pml": "ob1",
        "OMPI_MCA_osc": "^ucx",
        "OMPI_MCA_btl": "^ofi",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


@pytest.mark.parametrize(
    ("interfaces", "own", "expected"),
    [(("eth0", "ib1"), {}, "eth0,ib1"), (("10.0.0.0/8", "10.1.2.3"), {}, None),
     (("fe80::1", "eth0"), {}, "eth0"), (("eth0",), {"NCCL_SOCKET_IFNAME": "=x"}, "=x"),
     ((), {}, None)],
)  # fmt: skip
def test_nccl_gets_the_interfaces_that_have_names(
    interfaces: tuple[str, ...], own: dict[str, str], expected: str | None
) -> None:
    for mpi in (None, OMPI5):
        passed = rank_environment(own, mpi, options(network_interfaces=interfaces))
        assert passed.get("NCCL_SOCKET_IFNAME") == expected
        assert passed.get("HVDLITE_NETWORK_INTERFACES", "") == ",".join(interfaces)


def test_a_chosen_mpi_is_loaded_from_where_its_program_is(tmp_path: Path) -> None:
    for folder in ("bin", "lib"):
        (tmp_path / folder).mkdir()
    mpich = Mpi(HYDRA, str(tmp_path / "bin" / "mpiexec"), "MPICH 5.0.2", 5)
    chosen = {"MPI4PY_MPIABI": "mpich"}
    system = rank_environment(chosen, mpich, options())  # the dynamic linker finds its library
    assert system["MPI4PY_MPIABI"] == "mpich"
    assert "MPI4PY_LIBMPI" not in system
    library = tmp_path / "lib" / "libmpi.so.12"
    library.touch()
    passed = rank_environment(chosen, mpich, options())
    assert passed["MPI4PY_LIBMPI"] == str(library)
    assert "MPI4PY_MPIABI" not in passed
    own = rank_environment({**chosen, "MPI4PY_LIBMPI": "/own"}, mpich, options())
    assert own["MPI4PY_LIBMPI"] == "/own"
    assert "MPI4PY_LIBMPI" not in rank_environment({}, mpich, options())


def test_mpich_is_found_beside_an_mpirun_of_another_mpi(tmp_path: Path) -> None:
    mpich = "HYDRA build details:\n    Version:         5.0.2"
    for name, text in (("mpirun", "mpirun (Open MPI) 5.0.11"), ("mpiexec.hydra", mpich)):
        executable(tmp_path / name, f"echo '{text}'")
    environ = {"PATH": str(tmp_path), "MPI4PY_MPIABI": "mpich"}
    assert find_mpi(environ, hosts_given=False).name == "MPICH 5.0.2"


def test_other_hosts_do_not_get_what_describes_this_one() -> None:
    environ = dict.fromkeys(("PATH", "A", "HOSTNAME", "TERM", "SSH_AUTH_SOCK", "TMPDIR", "_"), "x")
    assert names_for_other_hosts(environ) == ("A", "PATH")
