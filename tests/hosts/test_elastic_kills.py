"""Workers on three hosts die at all places, some in each job; the others train on."""

from __future__ import annotations

import pytest

from tests.launcher.elastic_scenarios.jobs import Fault, check_weights, recovery_seconds
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(120)

SIZE, STEPS = 6, 24
RECOVERY_SECONDS = 4.0  # Alone it takes tenths of one; the driver would help itself after 5.
MEGABYTES = {"ELEMENTS": 300_000}


def dies(worker: int, place: str, step: int, **fields: int) -> Fault:
    return {"worker": worker, "place": place, "step": step, **fields}


@pytest.mark.parametrize(
    ("faults", "variables"),
    [
        ([dies(3, "ring", 3, skip=5), dies(0, "negotiation", 6), dies(4, "ring", 9, skip=5)],
         {**MEGABYTES, "HVDLITE_ALLREDUCE": "ring"}),
        ([dies(1, "negotiation", 3), dies(5, "idle", 6), dies(2, "check", 9), dies(0, "saved", 12)],
         {**MEGABYTES, "HVDLITE_NATIVE": "auto", "HVDLITE_ALLREDUCE": "hierarchical"}),
        ([dies(2, "shm", 3, skip=3), dies(5, "save", 6), dies(4, "between collectives", 9)],
         {**MEGABYTES, "HVDLITE_NATIVE": "off", "HVDLITE_ALLREDUCE": "hierarchical"}),
        # Some die while the loss of another one is dealt with.
        ([dies(1, "idle", 3), dies(4, "connecting", 1), dies(5, "idle", 6),
          dies(0, "on_reset", 5), dies(2, "meeting", 5)], {}),
        ([dies(0, "idle", 3), dies(3, "mesh building", 1), dies(1, "idle", 6),
          dies(4, "restore", 5), dies(2, "in init", 5)], {}),
        # Before the others train, the newcomer in the place of one of them, and two at once.
        ([dies(1, "before init", 0), dies(2, "in init", 0), dies(4, "synced", 0),
          dies(6, "sync", 0)], {}),
        ([dies(2, "saved", 3), dies(5, "saved", 3), dies(0, "idle", 8), dies(1, "idle", 8),
          dies(3, "idle", 8)], {}),
    ],
    ids=["ring", "hierarchical", "shared memory", "in resets", "in other resets", "at the start",
         "at once"],
)  # fmt: skip
def test_survivors_go_on(site: Site, faults: list[Fault], variables: dict[str, object]) -> None:
    outcome = site.run("train_numpy", *site.flags(SIZE), faults=faults, STEPS=STEPS, **variables)
    expected = {fault["worker"] for fault in faults}
    assert {line["worker"] for line in outcome.faults} == expected, outcome.out + outcome.err
    check_weights(outcome, STEPS)
    assert recovery_seconds(outcome) < RECOVERY_SECONDS, outcome.out + outcome.err
