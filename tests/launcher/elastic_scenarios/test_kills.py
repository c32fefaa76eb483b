"""A worker is killed at each place: the others go on from the last commit, in a moment."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from tests.launcher.elastic_scenarios.jobs import Fault, Outcome, check_weights, recovery_seconds
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(120)

STEPS = 8
# On two cores that other tests use as well.
RECOVERY_SECONDS = 4.0  # Alone it takes tenths of one; the driver would help itself after 5.
RESET_SECONDS = 0.2  # Where a killed process resets its sockets; half of the times must be lower.
PYTHON, NATIVE = {"HVDLITE_NATIVE": "off"}, {"HVDLITE_NATIVE": "auto"}
MEGABYTES = 200_000  # Elements: so many that an allreduce takes many pieces.
# By place: fields of the fault, and variables of the job.
TRAINING = {
    "idle": ({}, {}),
    # Without compiled code: else the ranks of a host exchange small data by themselves.
    "negotiation": ({}, PYTHON),
    "shm": ({"skip": 20}, {**PYTHON, "ELEMENTS": MEGABYTES}),
    "native shm": ({}, {**NATIVE, "ELEMENTS": 4 * MEGABYTES}),
    "between collectives": ({}, {}),
    "save": ({}, {}),
    "saved": ({}, {}),
    "check": ({}, {}),
}
RESETTING = ["in init", "meeting", "mesh building", "restore", "on_reset"]


def check(outcome: Outcome, *victims: int) -> float:
    """The victims have died, the others went on; nothing but the last step was made again.

    Return the seconds from the last death to the end of the first allreduce after it.
    """
    assert [(line["worker"], line["do"]) for line in outcome.faults] == [
        (victim, "kill") for victim in victims
    ], outcome.out + outcome.err
    check_weights(outcome, STEPS)
    took = recovery_seconds(outcome)
    assert took < RECOVERY_SECONDS, outcome.out + outcome.err
    for number in {line["number"] for line in outcome.results}:
        own = [line for line in outcome.lines if line["number"] == number]
        made = [line["done"] for line in own if "done" in line]
        assert len(made) - len(set(made)) <= len(victims)
    return took


def in_training(site: Site, place: str, victim: int, size: int) -> float:
    """Kill a worker of the first world while it trains."""
    fields, variables = TRAINING[place]
    fault: Fault = {"worker": victim, "place": place, "step": 4, **fields}
    words = ("train_numpy", *site.flags(size))
    return check(site.run(*words, faults=[fault], STEPS=STEPS, **variables), victim)


def in_ring(site: Site, victim: int, size: int) -> None:
    """Kill a worker between two pieces that it sends to another host, or inside of a hierarchy."""
    fault: Fault = {"worker": victim, "place": "ring", "step": 4, "skip": 5}
    algorithm = "ring" if size % 2 else "hierarchical"
    outcome = site.run(
        "train_numpy", *site.flags(size, 2), faults=[fault], STEPS=STEPS, ELEMENTS=MEGABYTES,
        HVDLITE_ALLREDUCE=algorithm,
    )  # fmt: skip
    check(outcome, victim)


def in_reset(site: Site, place: str, victim: int, size: int, hosts: int) -> None:
    """Kill a worker while the loss of the last one is dealt with."""
    first = size - 1 if victim != size - 1 else 0
    faults: list[Fault] = [
        {"worker": first, "place": "idle", "step": 4},
        # It passes the place in the reset, with whatever step it has ended by then.
        {"worker": victim, "place": place, "step": 1},
    ]
    words = ("train_numpy", *site.flags(size, hosts))
    check(site.run(*words, faults=faults, STEPS=STEPS), first, victim)


def at_start(site: Site, place: str, victim: int, size: int) -> Outcome:
    """Kill a worker before the others train: another one comes, or the others go on."""
    outcome = site.run(
        "train_numpy", *site.flags(size), faults=[{"worker": victim, "place": place}], STEPS=STEPS
    )
    assert [line["worker"] for line in outcome.faults] == [victim]
    check_weights(outcome, STEPS)
    return outcome


# Each rank dies somewhere; the soak has all ranks at all places, and the simulation all orders.
@pytest.mark.parametrize(("place", "victim"), [("native shm", 0), ("shm", 2), ("save", 1)])
def test_in_training(site: Site, place: str, victim: int) -> None:
    in_training(site, place, victim, 3)


def test_in_a_ring_between_hosts(site: Site) -> None:
    in_ring(site, 0, 4)


@pytest.mark.parametrize(
    ("place", "victim", "hosts"),
    [("restore", 0, 1), ("connecting", 1, 2)],
)  # fmt: skip
def test_in_the_reset_of_another_kill(site: Site, place: str, victim: int, hosts: int) -> None:
    in_reset(site, place, victim, 4, hosts)


@pytest.mark.parametrize(("place", "victim"), [("meeting", 1), ("sync", 0)])
def test_at_the_start(site: Site, place: str, victim: int) -> None:
    at_start(site, place, victim, 3)


@pytest.mark.parametrize(
    "kills", [6, pytest.param(200, marks=[pytest.mark.soak, pytest.mark.timeout(900)])]
)
def test_many_kills(site: Site, kills: int) -> None:
    """So many workers die at random, one after another and some of them in the resets of others."""
    random, size = Random(kills), 4
    faults: list[Fault] = []
    for worker in range(kills):
        # One in each world; some die before that, in the resets of others.
        skip = random.randrange(1, 30) if worker % 3 else 100
        faults.append({"worker": worker, "place": "large enough", "skip": skip})
        if not worker % 3:
            faults.append({"worker": worker, "place": random.choice(RESETTING), "skip": 1})
    outcome = site.run(
        "train_numpy", *site.flags(size), faults=faults, timeout=800, STEPS=STEPS,
        LEAST_SIZE=size - 1, FIRST_TO_LIVE=kills,
    )  # fmt: skip
    check_weights(outcome, STEPS)
    assert {line["worker"] for line in outcome.faults} == set(range(kills))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_every_rank_at_every_place(site: Site, size: int) -> None:
    took = []
    for victim in range(size):
        took += [in_training(site, place, victim, size) for place in TRAINING]
        in_ring(site, victim, size)
        for place in ("before init", "in init", "meeting", "mesh building", "sync", "synced"):
            at_start(site, place, victim, size)
        if size > 2:
            for place in RESETTING:
                in_reset(site, place, victim, size, 1)
        if size > 3:  # Two hosts are left after a death.
            in_reset(site, "connecting", victim, size, 2)
    assert median(took) < RESET_SECONDS, took
