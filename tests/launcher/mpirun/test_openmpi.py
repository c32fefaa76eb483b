"""Which parameters of Open MPI the launcher sets: only those that its user has not set."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hvdlite.common.base.networks import has_fabric
from hvdlite.launcher.hosts.hosts import parse_hosts
from hvdlite.launcher.jobs import environment
from hvdlite.launcher.jobs.environment import rank_environment
from hvdlite.launcher.mpirun.mpi import HYDRA, SLURM, Mpi, parameter_given
from tests.launcher.jobs import launch
from tests.launcher.mpirun import with_openmpi
from tests.launcher.mpirun.test_commands import MPICH, OMPI4, OMPI5, SRUN, options


@pytest.fixture(autouse=True)
def no_fabric(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "has_fabric", lambda: False)


@pytest.mark.parametrize("mpi", [OMPI5, OMPI4, SRUN])
def test_libfabric_is_not_opened_where_nobody_needs_it(mpi: Mpi, tmp_path: Path) -> None:
    assert rank_environment({"HOME": str(tmp_path)}, mpi, options())["OMPI_MCA_btl"] == "^ofi"


def test_mpich_gets_no_parameters_of_open_mpi() -> None:
    for mpi in (MPICH, Mpi(SLURM, "/usr/bin/srun", "srun", 0, library=HYDRA)):
        names = rank_environment({}, mpi, options())
        assert not any(name.startswith("OMPI_") for name in names)


def test_a_fabric_keeps_the_component_that_drives_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert not has_fabric(tmp_path)
    (tmp_path / "infiniband").mkdir()
    assert not has_fabric(tmp_path)
    (tmp_path / "infiniband" / "efa_0").mkdir()
    assert has_fabric(tmp_path)
    monkeypatch.setattr(environment, "has_fabric", lambda: True)
    assert "OMPI_MCA_btl" not in rank_environment({}, OMPI5, options())


@pytest.mark.parametrize(
    "words",
    [("--mca", "btl", "self,tcp"), ("-mca", "btl", "^x"), ("--tune", "file"), ("--am", "file")],
)
def test_mpi_args_of_the_user_win(words: tuple[str, ...]) -> None:
    assert "OMPI_MCA_btl" not in rank_environment({}, OMPI5, options(mpi_args=words))
    other = options(mpi_args=("--mca", "pml", "btl"))
    assert rank_environment({}, OMPI5, other)["OMPI_MCA_btl"] == "^ofi"


def test_a_variable_of_the_user_wins() -> None:
    given = rank_environment({"OMPI_MCA_btl": "self,sm"}, OMPI5, options())
    assert given["OMPI_MCA_btl"] == "self,sm"
    assert rank_environment({}, OMPI5, options(tcp=True))["OMPI_MCA_btl"].startswith("^uct,ofi")


def test_parameter_files_of_the_user_win(tmp_path: Path) -> None:
    own = tmp_path / ".openmpi" / "mca-params.conf"
    system = tmp_path / "etc" / "openmpi-mca-params.conf"
    program = str(tmp_path / "bin" / "mpirun")
    for folder in (own.parent, system.parent, tmp_path / "bin"):
        folder.mkdir()
    home = {"HOME": str(tmp_path)}
    for path in (own, system):
        path.write_text("# btl = tcp\nbtl_tcp_if_include = eth0\n")
        assert not parameter_given("btl", home, (), program)
        path.write_text("pml = ob1\nbtl = self,tcp\n")
        assert parameter_given("btl", home, (), program)
        path.unlink()
    own.write_text("btl=tcp\n")
    listed = {"OMPI_MCA_mca_base_param_files": f"/nonexistent:{own}"}
    assert parameter_given("btl", listed, (), program)


def test_between_hosts_open_mpi_notices_a_lost_link_and_leaves_bridges_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["lo", "eth0", "br-0123456789ab", "br-lan", "veth1a2b", "docker0"]
    monkeypatch.setattr(environment.socket, "if_nameindex", lambda: list(enumerate(names, 1)))
    hosts = parse_hosts("a:2,b:2")
    given = rank_environment({}, OMPI5, options(hosts=hosts))
    assert given["OMPI_MCA_mpi_ft_detector"] == "1"
    excluded = given["OMPI_MCA_btl_tcp_if_exclude"].split(",")
    assert {"127.0.0.1/8", "sppp", "docker0", "br-0123456789ab", "veth1a2b"} <= {*excluded}
    assert not {"eth0", "br-lan"} & {*excluded}
    assert len(excluded) == len({*excluded})
    monkeypatch.setattr(environment.socket, "if_nameindex", lambda: [(1, "lo"), (2, "veth0")])
    container = rank_environment({}, OMPI5, options(hosts=hosts))
    assert "veth0" not in container["OMPI_MCA_btl_tcp_if_exclude"]
    alone = rank_environment({}, OMPI5, options())
    assert not {"OMPI_MCA_mpi_ft_detector", "OMPI_MCA_btl_tcp_if_exclude"} & {*alone}
    # Open MPI refuses both lists.
    chosen = {"OMPI_MCA_btl_tcp_if_include": "eth0"}
    assert "OMPI_MCA_btl_tcp_if_exclude" not in rank_environment(
        chosen, OMPI5, options(hosts=hosts)
    )
    named = options(hosts=hosts, network_interfaces=("eth0",))
    assert "OMPI_MCA_btl_tcp_if_exclude" not in rank_environment({}, OMPI5, named)


@with_openmpi
@pytest.mark.usefixtures("with_mpirun")
@pytest.mark.skipif(has_fabric(), reason="libfabric drives a network here")
def test_ranks_do_not_open_the_component_that_opens_libfabric() -> None:
    words = ("-np", "2", sys.executable, "-c", "import mpi4py.MPI")
    assert "component ofi" not in launch(*words, OMPI_MCA_btl_base_verbose="20").stderr
    asked = launch(*words, OMPI_MCA_btl_base_verbose="20", OMPI_MCA_btl="self,sm,ofi")
    assert "component ofi" in asked.stderr
