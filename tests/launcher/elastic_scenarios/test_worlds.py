"""Worlds that shrink and grow: several deaths at once, hosts that go, and what is in flight."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.elastic_scenarios.jobs import (
    Fault,
    Outcome,
    check_weights,
    discovery,
    flags,
    recovery_seconds,
    run,
)

pytestmark = pytest.mark.timeout(60)

RECOVERY_SECONDS = 1.0
STEPS = 12


def dies(worker: int, place: str = "idle", step: int = 4, **fields: Any) -> Fault:
    return {"worker": worker, "place": place, "step": step, **fields}


def sizes(outcome: Outcome) -> list[int]:
    """The sizes of all worlds in their order."""
    return [len(members) for members in outcome.worlds().values()]


@pytest.mark.parametrize("victims", [(1, 2), (0, 1, 3)])
def test_several_ranks_at_once(victims: tuple[int, ...]) -> None:
    faults = [dies(victim) for victim in victims]
    outcome = run("train_numpy", *flags(4), faults=faults, STEPS=STEPS)
    assert {line["worker"] for line in outcome.faults} == {*victims}
    check_weights(outcome, STEPS)
    assert recovery_seconds(outcome) < RECOVERY_SECONDS


@pytest.mark.parametrize(
    "place", ["sync", *(pytest.param(p, marks=pytest.mark.soak) for p in ("before init", "idle"))]
)
def test_a_rank_and_the_newcomer_in_its_place(place: str) -> None:
    """Number 2 comes for 1, and 3 for 2; the others wait for it at a step."""
    faults = [dies(1), dies(2, place, step=0)]
    outcome = run("train_numpy", *flags(2), faults=faults, STEPS=STEPS, HOLD="8 2")
    assert [line["worker"] for line in outcome.faults] == [1, 2]
    result = check_weights(outcome, STEPS)
    assert result["history"][-1][1] == [0, 3]


def test_down_to_one_rank_and_up_again() -> None:
    faults = [dies(0, step=3), dies(2, step=6)]
    job = run("train_numpy", *flags(3), faults=faults, STEPS=STEPS, HOLD="9 3")
    result = check_weights(job, STEPS)
    members = dict(result["history"])
    assert (members[2], members[STEPS - 1][0]) == ([0, 1, 2], 1)
    assert len(members[STEPS - 1]) == 3


@pytest.mark.parametrize(
    ("place", "hosts", "variables"),
    [("shm", 1, {"HVDLITE_NATIVE": "off", "ELEMENTS": 500_000}),
     ("ring", 2, {"ELEMENTS": 500_000})],
)  # fmt: skip
def test_a_rank_that_is_stopped_in_a_collective(
    place: str, hosts: int, variables: dict[str, Any]
) -> None:
    """It is given up; when it goes on, it ends."""
    fault = dies(1, place, do="stop", skip=3)
    job = flags(4 if hosts == 2 else 3, hosts)
    outcome = run("train_numpy", *job, faults=[fault], STEPS=STEPS, **variables)
    check_weights(outcome, STEPS)
    stopped = outcome.faults[0]["number"]
    assert all(line["number"] != stopped for line in outcome.results)
    assert "rank 1" in outcome.err and "stopped" in outcome.err


def test_all_hosts_are_replaced_at_once(tmp_path: Path) -> None:
    """Nobody who holds the state is left."""
    words = ("-np", "1", *discovery(tmp_path, "localhost:1"))
    fault = dies(0, do="hosts 127.0.0.1:1")
    outcome = run(
        "train_numpy", *words, faults=[fault], STEPS=STEPS, HOLD="6 2",
        SCENARIO_HOSTS=tmp_path / "hosts",
    )  # fmt: skip
    assert outcome.code == 1
    assert outcome.results == []
    assert outcome.err.splitlines()[-1] == "hvdlite-run: No hosts from previous set remaining"


def test_old_hosts_serve_until_the_newcomers_have_their_state(tmp_path: Path) -> None:
    """Hosts are replaced, and discovery shows the old ones until the new ones train."""
    words = ("-np", "1", *discovery(tmp_path, "localhost:1"))
    faults = [
        dies(0, do="hosts localhost:1 127.0.0.1:1"),
        dies(1, "between collectives", do="hosts 127.0.0.1:1"),
    ]
    outcome = run(
        "train_numpy", *words, faults=faults, STEPS=STEPS, HOLD="6 2", LATER="9 3",
        SCENARIO_HOSTS=tmp_path / "hosts",
    )  # fmt: skip
    result = check_weights(outcome, STEPS)
    assert result["history"][0][1] == [0]
    assert result["history"][-1][1] == [1]
    # Nobody was lost, and nothing is made again.
    done = [line["done"] for line in outcome.lines if "done" in line and line["number"] == 0]
    assert len(done) == len(set(done))
    assert "lost" not in outcome.err


def test_below_min_np_until_capacity_returns_seconds_later(tmp_path: Path) -> None:
    """A host was removed in order, so survivors hold all; the newcomer holds nothing."""
    words = ("-np", "2", "--min-np", "2", *discovery(tmp_path, "localhost:1", "127.0.0.1:1"))
    hosts, later = tmp_path / "hosts", 3.0
    changed: list[float] = []

    def return_later() -> None:
        deadline = time.monotonic() + 30
        while "127" in hosts.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(later)  # So long is capacity missing.
        changed.append(time.monotonic())
        hosts.write_text("localhost:2\n")

    thread = threading.Thread(target=return_later)
    thread.start()
    outcome = run(
        "train_numpy", *words, faults=[dies(0, do="hosts localhost:1")], STEPS=STEPS,
        LATER="5 2", SCENARIO_HOSTS=hosts,
    )  # fmt: skip
    thread.join()
    result = check_weights(outcome, STEPS)
    assert result["history"][-1][1] == [result["history"][0][1][0], 2]
    entered = [line["time"] for line in outcome.lines if "entered" in line and line["number"] == 2]
    assert entered[0] > changed[0]
    assert "lost" not in outcome.err


@pytest.mark.parametrize(
    ("victim", "place"), [(0, "all begun"), (1, "half begun"), (3, "all begun")]
)
def test_collectives_of_all_kinds_in_flight(victim: int, place: str) -> None:
    """Sets, groups, Adasum and alltoall are right with 4, 3 and 4 ranks, and with a full cache."""
    outcome = run(
        "train_mixed", *flags(4, 1 + victim % 2), faults=[dies(victim, place)], STEPS=STEPS,
        HOLD="8 4", HVDLITE_CACHE_CAPACITY="4",
    )  # fmt: skip
    result = check_weights(outcome, STEPS)
    assert {len(members) for _, members in result["history"]} == {3, 4}


def test_the_size_goes_from_four_to_three_to_five(tmp_path: Path) -> None:
    words = ("-np", "4", "--min-np", "1", *discovery(tmp_path, "localhost:4"))
    faults = [dies(2, "all begun"), dies(0, "half begun", step=7, do="hosts localhost:5")]
    outcome = run(
        "train_mixed", *words, faults=faults, STEPS=STEPS, HOLD="8 5",
        SCENARIO_HOSTS=tmp_path / "hosts", HVDLITE_CACHE_CAPACITY="4",
    )  # fmt: skip
    result = check_weights(outcome, STEPS)
    found = [len(members) for _, members in result["history"]]
    assert (found[0], found[-1]) == (4, 5) and 3 in found


def test_shapes_that_ranks_disagree_about_reset_nothing() -> None:
    """It is an error of the script, which comes again after each reset."""
    outcome = run("train_numpy", *flags(3), STEPS=STEPS, MISMATCH_STEP="5")
    assert outcome.code == 1
    assert list(outcome.worlds()) == [1]
    errors = [line["error"] for line in outcome.lines if "error" in line]
    assert len(errors) == 3
    assert all("gradient" in error for error in errors)
    assert "gradient" in outcome.err.splitlines()[-1]
