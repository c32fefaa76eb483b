"""What starts the ranks of a test, each launcher in turn; and where elastic jobs run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from tests.forks import NUMPY, forks
from tests.launcher.elastic_scenarios.sites import OneHost, Site
from tests.parallel.jobs import MPIRUN, NO_MPIRUN


@pytest.fixture(params=[pytest.param("ssh", id="agents"), pytest.param("mpirun", id="mpirun")])
def launcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return what starts the ranks: "ssh", which is agents, or "mpirun"."""
    name: str = request.param
    if name == "mpirun" and MPIRUN is None:
        pytest.skip(NO_MPIRUN)
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
def by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let functions of the test's module be sent whole: ranks need not import pytest for them."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Return this host, with an empty folder."""
    return OneHost(tmp_path)


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Return the process groups that are signalled; none may be empty, as its number is free."""
    groups: list[int] = []
    stale: list[int] = []
    signal_group = os.killpg

    def note(group: int, number: int) -> None:
        groups.append(group)
        try:
            signal_group(group, number)
        except ProcessLookupError:
            stale.append(group)
            raise

    monkeypatch.setattr(os, "killpg", note)
    yield groups
    assert stale == []
