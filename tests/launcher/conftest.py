"""What starts the ranks of a test, each launcher in turn; and where elastic jobs run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.forks import NUMPY, forks
from tests.launcher.elastic_scenarios.sites import OneHost, Site
from tests.parallel.jobs import MPIRUN, NO_MPIRUN

over_mpirun = pytest.param(
    "mpirun", marks=pytest.mark.skipif(MPIRUN is None, reason=NO_MPIRUN), id="mpirun"
)


@pytest.fixture(params=[pytest.param("ssh", id="agents"), over_mpirun])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what starts the ranks: "ssh", which is agents, or "mpirun"."""
    name: str = request.param
    monkeypatch.setenv("HVDLITE_LAUNCHER", name)
    return name


@pytest.fixture
def with_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let mpirun start the ranks."""
    if MPIRUN is None:
        pytest.skip(NO_MPIRUN)
    monkeypatch.setenv("HVDLITE_LAUNCHER", "mpirun")


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what this process starts be forked, as agents of `hvdlite.run` and their ranks."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(subprocess, "Popen", forks(*NUMPY))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return this host, with an empty folder."""
    return OneHost(tmp_path)
