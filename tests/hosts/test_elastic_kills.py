"""Workers on three hosts die in a ring, in a reset and at the start; the others train on."""

from __future__ import annotations

import json

import pytest

from tests.hosts.jobs import LAUNCHER
from tests.hosts.lab import ROOT, Lab
from tests.launcher.elastic_scenarios.jobs import (
    Fault,
    Outcome,
    check_weights,
    recovery_seconds,
)

pytestmark = pytest.mark.timeout(60)

STEPS = 12
RECOVERY_SECONDS = 1.0
FLAGS = ("-np", "6", "--min-np", "2", "-H", "nodea:2,nodeb:2,nodec:2")


def run(lab: Lab, faults: list[Fault], **variables: str) -> Outcome:
    module = "tests.launcher.elastic_scenarios.train_numpy"
    done = lab.run(
        "nodea", *LAUNCHER, *FLAGS, "python", "-m", module,
        FAULTS=json.dumps(faults), FIRST_WORKERS="6", STEPS=str(STEPS),
        HVDLITE_ELASTIC_CHECK="1", PYTHONPATH=str(ROOT), **variables,
    )  # fmt: skip
    return Outcome.of(done)


@pytest.mark.parametrize(
    ("faults", "victims"),
    [
        ([{"worker": 3, "place": "ring", "step": 4, "skip": 5}], [3]),
        ([{"worker": 0, "place": "negotiation", "step": 4}], [0]),
        ([{"worker": 1, "place": "idle", "step": 4},
          {"worker": 4, "place": "connecting", "step": 1}], [1, 4]),
        ([{"worker": 2, "place": "saved", "step": 4}, {"worker": 5, "place": "saved", "step": 4}],
         [2, 5]),
    ],
)  # fmt: skip
def test_survivors_go_on(lab: Lab, faults: list[Fault], victims: list[int]) -> None:
    outcome = run(lab, faults, ELEMENTS="300000", HVDLITE_ALLREDUCE="ring")
    assert sorted(line["worker"] for line in outcome.faults) == victims, outcome.out + outcome.err
    check_weights(outcome, STEPS)
    assert recovery_seconds(outcome) < RECOVERY_SECONDS, outcome.out + outcome.err
