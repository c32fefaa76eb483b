"""The seeds find what people once found: mistakes that were mended, put back one at a time."""

from __future__ import annotations

import pytest

from tests.simulation.known_bugs import ELASTIC_BUGS, KNOWN_BUGS, PS_BUGS
from tests.simulation.ranks.job import PROGRESS
from tests.simulation.shrinking import KINDS, Kind, shrink

MOST_SEEDS = 1000


def is_found(kind: Kind) -> bool:
    return any(kind.play(kind.make(seed)).broken for seed in range(MOST_SEEDS))


@pytest.mark.parametrize("name", KNOWN_BUGS)
def test_a_bug_of_ranks_is_found(name: str) -> None:
    with KNOWN_BUGS[name]():
        assert is_found(KINDS["ranks"])


@pytest.mark.parametrize("name", ELASTIC_BUGS)
def test_a_bug_of_elastic_jobs_is_found(name: str) -> None:
    with ELASTIC_BUGS[name]():
        assert is_found(KINDS["elastic"])


@pytest.mark.parametrize("name", PS_BUGS)
def test_a_bug_of_parameter_servers_is_found(name: str) -> None:
    with PS_BUGS[name]():
        assert is_found(KINDS["ps"])


def test_a_seed_that_fails_is_shrunk_to_what_matters() -> None:
    """A departure is not told to ranks that have joined: two ranks are enough, and a departure."""
    kind = KINDS["ranks"]
    with KNOWN_BUGS["a departure with a join outstanding"]():
        jobs = (kind.play(kind.make(seed)) for seed in range(MOST_SEEDS))
        job = next(job for job in jobs if job.broken and job.broken.law == PROGRESS)
        small = shrink(kind, job)
    assert small.broken is not None
    assert small.broken.law == PROGRESS
    assert small.program.size == 2
    assert (small.program.kills, small.program.retunings) == ((), ())
    assert sum(len(epoch.calls) for epoch in small.program.epochs) == 0
