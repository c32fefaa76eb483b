"""Over what the ranks of a test's job are connected.

Jobs of the core and of each framework run over TCP without MPI, and over MPI. What is about MPI
itself runs under mpirun, with either transport. Examples, pages and benchmarks run once, as they
are started there.
"""

from __future__ import annotations

import pytest

from tests.parallel import jobs


def choose(monkeypatch: pytest.MonkeyPatch, transport: str) -> str:
    """Have jobs started for a transport; skip the test where it is not there."""
    if transport != jobs.TCP and jobs.MPIRUN is None:
        pytest.skip(jobs.NO_MPIRUN)
    monkeypatch.setattr(jobs, "transport", transport)
    return transport


@pytest.fixture(params=[jobs.TCP, jobs.MPI])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test over TCP without MPI, and over MPI."""
    return choose(monkeypatch, request.param)


@pytest.fixture(params=[jobs.TCP_BY_MPIRUN, jobs.MPI])
def by_mpirun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test under mpirun, over TCP and over MPI."""
    return choose(monkeypatch, request.param)


@pytest.fixture
def over_mpi(monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test over MPI."""
    return choose(monkeypatch, jobs.MPI)
