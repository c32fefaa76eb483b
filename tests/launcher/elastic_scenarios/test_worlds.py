"""Worlds that shrink and grow: several deaths at once, hosts that go, and what is in flight."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.launcher.elastic_scenarios.jobs import Fault, Outcome, check_weights, recovery_seconds
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(120)

RECOVERY_SECONDS = 4.0  # Alone it takes tenths of one; the driver would help itself after 5.
STEPS = 12
WEIGHTS = 500_000  # Elements of 8 bytes.


def dies(worker: int, place: str = "idle", step: int = 4, **fields: Any) -> Fault:
    return {"worker": worker, "place": place, "step": step, **fields}


def sizes(outcome: Outcome) -> list[int]:
    """The sizes of all worlds in their order."""
    return [len(members) for members in outcome.worlds().values()]


@pytest.mark.parametrize("victims", [(0, 1, 3), pytest.param((1, 2), marks=pytest.mark.soak)])
def test_several_ranks_at_once_and_up_again(site: Site, victims: tuple[int, ...]) -> None:
    faults = [dies(victim) for victim in victims]
    outcome = site.run("train_numpy", *site.flags(4), faults=faults, STEPS=STEPS, HOLD="9 4")
    assert {line["worker"] for line in outcome.faults} == {*victims}
    members = dict(check_weights(outcome, STEPS)["history"])
    left = [number for rank, number in enumerate(members[0]) if rank not in victims]
    assert (sorted(members[0]), len(members[STEPS - 1])) == ([0, 1, 2, 3], 4)
    assert members[STEPS - 1][: len(left)] == left and left in members.values()
    assert recovery_seconds(outcome) < RECOVERY_SECONDS


@pytest.mark.parametrize(
    "place", ["sync", *(pytest.param(p, marks=pytest.mark.soak) for p in ("before init", "idle"))]
)
def test_a_rank_and_the_newcomer_in_its_place(site: Site, place: str) -> None:
    """Number 2 comes for 1, and 3 for 2; the others wait for it at a step."""
    faults = [dies(1), dies(2, place, step=0)]
    outcome = site.run("train_numpy", *site.flags(2), faults=faults, STEPS=STEPS, HOLD="8 2")
    assert [line["worker"] for line in outcome.faults] == [1, 2]
    result = check_weights(outcome, STEPS)
    assert result["history"][-1][1] == [result["history"][0][1][0], 3]


@pytest.mark.parametrize(
    ("place", "hosts_at_least", "algorithm"),
    [("shm", 1, "hierarchical"), pytest.param("ring", 2, "ring", marks=pytest.mark.soak)],
)
def test_a_rank_that_is_stopped_in_a_collective(
    site: Site, place: str, hosts_at_least: int, algorithm: str
) -> None:
    """It is given up; when it goes on, it ends."""
    size = 2 * max(site.used, hosts_at_least)
    outcome = site.run(
        "train_numpy", *site.flags(size, hosts_at_least), STEPS=STEPS, ELEMENTS=500_000,
        faults=[dies(1, place, do="stop", skip=3)], HOLD=f"{STEPS - 3} {size}",
        HVDLITE_NATIVE="off", HVDLITE_ALLREDUCE=algorithm,
    )  # fmt: skip
    check_weights(outcome, STEPS)
    stopped = outcome.faults[0]["number"]
    assert all(line["number"] != stopped for line in outcome.results)
    assert "rank 1" in outcome.err and "stopped" in outcome.err


def test_the_only_rank_left_is_removed_while_its_successor_starts(site: Site) -> None:
    """It trains on, and gives the state to the worker that takes the place of a killed one."""
    stays, goes, _ = site.hosts
    faults = [dies(0), dies(1, do=f"hosts {stays}:1", step=5)]
    outcome = site.run(
        "train_numpy", "-np", "2", "--min-np", "1", *site.discovery(f"{stays}:1", f"{goes}:1"),
        faults=faults, STEPS=STEPS, LATER="9 4",
    )  # fmt: skip
    result = check_weights(outcome, STEPS)
    assert result["history"][-1][1] == [2]
    # Numbers are in the order in which hosts come up.
    (removed,) = [fault["number"] for fault in outcome.faults if fault["do"].startswith("hosts")]
    assert result["history"][8][1][0] == removed


def test_old_hosts_serve_until_the_newcomers_have_their_state(site: Site) -> None:
    """Hosts are replaced, and discovery shows the old ones until the new ones train."""
    old, new, _ = site.hosts
    faults = [
        dies(0, do=f"hosts {old}:1 {new}:1"),
        dies(1, "between collectives", do=f"hosts {new}:1"),
    ]
    outcome = site.run(
        "train_numpy", "-np", "1", *site.discovery(f"{old}:1"), faults=faults, STEPS=STEPS,
        HOLD="6 2", LATER="9 3",
    )  # fmt: skip
    result = check_weights(outcome, STEPS)
    assert result["history"][0][1] == [0]
    assert result["history"][-1][1] == [1]
    # Nobody was lost, and nothing is made again.
    done = [line["done"] for line in outcome.lines if "done" in line and line["number"] == 0]
    assert len(done) == len(set(done))
    check_nothing_was_lost(outcome, removed=[0])


def check_nothing_was_lost(outcome: Outcome, removed: Sequence[int]) -> None:
    """Hosts have left in order: their workers end with code 0, and no rank goes back."""
    assert "lost" not in outcome.err, outcome.err
    assert [line for line in outcome.lines if "restored" in line] == []
    ends = {line["number"]: line["end"] for line in outcome.lines if "end" in line}
    assert ends == dict.fromkeys(removed, 0)


def test_a_host_that_leaves_costs_nothing(site: Site) -> None:
    """Nothing is redone, and no weights are sent; newcomers receive those of the oldest rank."""
    first, second, third = site.hosts
    faults = [
        dies(2, do=f"hosts {second}:1 {third}:1", step=4),  # The host of ranks 0 and 1 goes.
        dies(2, "idle", do=f"hosts {second}:1 {third}:2", step=7),
    ]
    outcome = site.run(
        "train_numpy", "-np", "4", "--min-np", "1",
        *site.discovery(f"{first}:2", f"{second}:1", f"{third}:1"), faults=faults, STEPS=STEPS,
        LATER="7 2", HOLD="10 3",
    )  # fmt: skip
    result = check_weights(outcome, STEPS)
    members = dict(result["history"])
    removed, kept = members[0][:2], members[0][2:]
    assert (members[7], members[11]) == (kept, [*kept, 4])
    for number in kept:
        own = [line for line in outcome.lines if line["number"] == number]
        assert [line["done"] for line in own if "done" in line] == list(range(1, STEPS + 1))
        received = [line["sent"] > 0 for line in own if "entered" in line]
        assert received == [True, False, number == kept[0]]  # The source of the newcomer's state.
    newcomer = next(line for line in outcome.lines if line["number"] == 4 and "entered" in line)
    assert newcomer["step"] == 10
    check_nothing_was_lost(outcome, removed)


@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_failure_without_newcomers_sends_no_weights(site: Site, victim: int) -> None:
    """All survivors hold the commit; the gradients are next to nothing beside the weights."""
    outcome = site.run(
        "train_numpy", *site.flags(3), faults=[dies(victim)], STEPS=STEPS, WEIGHTS=WEIGHTS,
        COMMIT_EVERY=100,
    )  # fmt: skip
    check_weights(outcome, STEPS)
    members = outcome.worlds()[1]
    survivors = [number for rank, number in enumerate(members) if rank != victim]
    for number in survivors:
        own = [line for line in outcome.lines if line["number"] == number]
        first, second = (line["sent"] for line in own if "entered" in line)
        assert (first >= 8 * WEIGHTS, second) == (True, 0)
        (restored,) = (line for line in own if "restored" in line)
        assert restored["restored"] == 1 and restored["step"] > 0
    if site.used > 1:  # All that has left the hosts of these ranks, and nothing else runs there.
        begun, restored, reduced = (
            {(line["number"], line[word]): line["wire"] for line in outcome.lines if word in line}
            for word in ("begun", "restored", "reduced")
        )
        assert reduced[members[0], 1] - begun[members[0], 0] >= 8 * WEIGHTS
        for number in survivors:
            assert reduced[number, 2] - restored[number, 1] < WEIGHTS


def test_below_min_np_until_capacity_returns_seconds_later(site: Site) -> None:
    """A host was removed in order, so survivors hold all; the newcomer holds nothing."""
    stays, goes, _ = site.hosts
    words = ("-np", "2", "--min-np", "2", *site.discovery(f"{stays}:1", f"{goes}:1"))
    hosts, later = site.folder / "hosts", 1.0
    changed: list[float] = []

    def return_later() -> None:
        deadline = time.monotonic() + 30
        while goes in hosts.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(later)  # So long is capacity missing.
        changed.append(time.monotonic())
        site.show(f"{stays}:2")

    thread = threading.Thread(target=return_later)
    thread.start()
    outcome = site.run(
        "train_numpy", *words, faults=[dies(0, do=f"hosts {stays}:1")], STEPS=STEPS, LATER="5 2",
    )  # fmt: skip
    thread.join()
    result = check_weights(outcome, STEPS)
    assert result["history"][-1][1] == [result["history"][0][1][0], 2]
    entered = [line["time"] for line in outcome.lines if "entered" in line and line["number"] == 2]
    assert entered[0] > changed[0]
    check_nothing_was_lost(outcome, removed=result["history"][0][1][1:])


@pytest.mark.parametrize(
    ("victim", "place"),
    [
        pytest.param(2, "one has joined", marks=pytest.mark.soak),
        pytest.param(0, "all begun", marks=pytest.mark.soak),
        pytest.param(1, "half begun", marks=pytest.mark.soak),
        pytest.param(3, "all begun", marks=pytest.mark.soak),
    ],
)
def test_collectives_of_all_kinds_in_flight(site: Site, victim: int, place: str) -> None:
    """Sets, groups, Adasum and alltoall are right with 4, 3 and 4 ranks, and with a full cache."""
    outcome = site.run(
        "train_mixed", *site.flags(4, 1 + victim % 2), faults=[dies(victim, place)], STEPS=STEPS,
        HOLD="8 4", HVDLITE_CACHE_CAPACITY="4", JOIN=4 if place == "one has joined" else -1,
    )  # fmt: skip
    assert [line["fault"] for line in outcome.faults] == [place]
    result = check_weights(outcome, STEPS)
    assert {len(members) for _, members in result["history"]} == {3, 4}


def test_the_size_goes_from_four_to_three_to_five(site: Site) -> None:
    """Ranks die while one has joined, and while collectives of all kinds are in flight."""
    words = ("-np", "4", "--min-np", "1", *site.discovery(*site.spread(4).split(",")))
    larger = site.spread(5).replace(",", " ")
    faults = [
        dies(2, "one has joined"), dies(1, "all begun", step=5),
        dies(0, "half begun", step=7, do=f"hosts {larger}"),
    ]  # fmt: skip
    outcome = site.run(
        "train_mixed", *words, faults=faults, STEPS=STEPS, HOLD="8 5", HVDLITE_CACHE_CAPACITY="4",
        JOIN=4,
    )  # fmt: skip
    assert [line["fault"] for line in outcome.faults] == [fault["place"] for fault in faults]
    result = check_weights(outcome, STEPS)
    found = [len(members) for _, members in result["history"]]
    assert (found[0], found[-1]) == (4, 5) and 3 in found


def test_shapes_that_ranks_disagree_about_reset_nothing(site: Site) -> None:
    """It is an error of the script, which comes again after each reset."""
    outcome = site.run("train_numpy", *site.flags(3), STEPS=STEPS, MISMATCH_STEP="5")
    assert outcome.code == 1
    assert list(outcome.worlds()) == [1]
    errors = [line["error"] for line in outcome.lines if "error" in line]
    assert len(errors) == 3
    assert all("gradient" in error for error in errors)
    assert "gradient" in outcome.err.splitlines()[-1]


def test_an_exception_is_known_before_its_process_has_ended(site: Site) -> None:
    """The others train before the process has ended, and only then another one takes its slot."""
    faults = [dies(1, do="raise slowly")]
    outcome = site.run("train_numpy", *site.flags(3), faults=faults, STEPS=STEPS, HOLD="8 3")
    result = check_weights(outcome, STEPS)
    victim = outcome.faults[0]["number"]
    assert result["history"][-1][1][-1] == 3
    assert victim not in result["history"][-1][1]
    (unwound,) = (line["time"] for line in outcome.lines if "unwound" in line)
    (begun,) = (
        line["time"] for line in outcome.lines if "begun" in line and line["number"] == 3
    )  # fmt: skip
    entered = [line["time"] for line in outcome.lines if line.get("entered") == 2]
    assert max(outcome.faults[0]["time"], *entered[:1]) < unwound < begun
    assert recovery_seconds(outcome) < RECOVERY_SECONDS
    assert outcome.err.count("was lost: ValueError: a fault at idle (exit code 1); ") == 1
    assert "Traceback" in outcome.err
