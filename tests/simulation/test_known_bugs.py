"""The seeds find what people once found: mistakes that were mended, put back one at a time."""

from __future__ import annotations

import pytest

from tests.simulation.known_bugs import ELASTIC_BUGS, KNOWN_BUGS, PS_BUGS
from tests.simulation.ranks.script import PROGRESS
from tests.simulation.shrinking import KINDS, shrink

MOST_SEEDS = 1000
BUGS = {"ranks": KNOWN_BUGS, "elastic": ELASTIC_BUGS, "ps": PS_BUGS}
# The first seeds that find these, which are tried first: others may do when programs have changed.
FIRST = {
    "a join overtakes what its rank reports again": 112,
    "a joined rank stays excused from what is evicted": 453,
    "a join overtakes what a leader holds": 5,
    "a departure with a join outstanding": 18,
    "a cancelled set leaves its evictions to the next one": 13,
    "a join that crossed an eviction is not repeated": 59,
    "what waits in a removed set is forgotten": 75,
    "a rank that waits for data hears nothing": 414,
    "a rank does not look for the meeting again": 7,
    "a leader ends before those below it": 1,
    "a peer that says nothing more is waited for": 24,
    "a claim is believed without its proof": 167,
    "a claim holds for another connection": 167,
    "a connection that is reset while it is proved is not tried again": 572,
    "who loses a connection names its other end": 171,
    "the last host that leaves": 2,
    "a newcomer is rank 0 while an older rank lives": 62,
    "hosts that come back make more ranks than the job may have": 389,
    "a worker starts where another one has not ended": 13,
    "the link that is cut": 391,
    "a rank that has to leave takes the last commit with it": 53,
    "a host is used again while its workers end": 533,
    "an agent starts while the workers of its predecessor end": 78,
    "a worker is stopped before it has connected": 367,
    "a slot is used again that had nothing for a worker": 526,
    "a folder stays on a host that was not reached": 20,
    "what a sync brings is no save": 237,
    "a worker is believed without its proof": 47,
    "a member is believed without its proof": 149,
    "a proof of a member holds for another connection": 149,
    "the restart of the scheduler amid scaling": 28,
    "the restart of a server amid scaling": 978,
    "a load leaves workers at their steps": 134,
    "a table is sent before all pushes of its border are here": 99,
    "a load is made by who leads it alone": 272,
    "a push that is sent again counts again": 234,
    "rows of the step before are forgotten": 153,
    "rows that a checkpoint has not stay": 23,
    "a file is renamed before it is on disk": 18,
}


@pytest.mark.parametrize(("world", "name"), [(world, bug) for world in BUGS for bug in BUGS[world]])
def test_a_bug_is_found(world: str, name: str) -> None:
    kind = KINDS[world]
    seeds = (FIRST.get(name, 0), *range(MOST_SEEDS))
    with BUGS[world][name]():
        assert any(kind.play(kind.make(seed)).broken for seed in seeds)


def test_a_seed_that_fails_is_shrunk_to_what_matters() -> None:
    """A departure is not told to ranks that have joined: two ranks are enough, and a departure."""
    kind = KINDS["ranks"]
    with KNOWN_BUGS["a departure with a join outstanding"]():
        jobs = (kind.play(kind.make(seed)) for seed in (22, *range(MOST_SEEDS)))
        job = next(job for job in jobs if job.broken and job.broken.law == PROGRESS)
        small = shrink(kind, job)
    assert small.broken is not None
    assert small.broken.law == PROGRESS
    assert small.program.size == 2
    assert (small.program.kills, small.program.retunings) == ((), ())
    assert sum(len(epoch.calls) for epoch in small.program.epochs) == 0
