"""Which rank failed first, and when a job ends step by step."""

from __future__ import annotations

import signal

import pytest

from hvdlite.launcher.decisions import endings as ending
from hvdlite.launcher.decisions.endings import Ending, Failure, FirstFailure, signal_name
from hvdlite.launcher.hosts.ssh import spell_end


def first_failure(*events: str) -> FirstFailure:
    heard = FirstFailure()
    for event in events:
        name, rank, *words = event.split()
        if name == "close":
            heard.closed = True
        elif name == "lose":
            heard.lose(int(rank))
        else:
            heard.receive(name, int(rank), words)
    return heard


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ([], None),
        (["exit 0 0", "exit 1 0"], None),
        (["exit 0 0", "exit 2 7", "exit 1 1"], Failure(2, 7)),
        # Rank 2 raised; rank 0 suffered from it, and was gone first.
        (["raised 2 own", "raised 0 internal", "exit 0 1", "exit 2 3"], Failure(2, 3)),
        # Rank 1 was killed; rank 0 noticed before the shell of rank 1 did.
        (["raised 0 internal", "exit 0 1", "exit 1 137"], Failure(1, 137)),
        # All suffer, and nobody knows why: the first.
        (["raised 1 internal", "raised 0 internal", "exit 0 1", "exit 1 1"], Failure(0, 1)),
        # Rank 1 raised and hung; it was ended with the rest.
        (["raised 1 own", "close 0", "exit 0 143", "exit 1 143"], Failure(1, 1)),
        # Python ends by SIGINT where it is a KeyboardInterrupt that nobody has caught.
        (["raised 1 own KeyboardInterrupt", "close 0", "exit 1 130"], Failure(1, 130)),
        # Rank 0 suffered; that we ended rank 1 is not the reason.
        (["raised 0 internal", "exit 0 1", "close 0", "exit 1 143"], Failure(0, 1)),
        # The same; rank 0 took longer to end than rank 1.
        (["raised 0 internal", "close 0", "exit 1 143", "exit 0 1"], Failure(0, 1)),
        (
            ["start 0 11 here", "lose 0", "exit 1 1"],
            Failure(0, 137, lost="was killed together with its shell"),
        ),
        # Rank 1 raised, and mpirun ended it with its shell because rank 0 had failed.
        (["raised 1 own", "raised 0 internal", "exit 0 1", "close 0", "lose 1"], Failure(1, 1)),
        # Both raised the same, and rank 0 ended well in spite of it.
        (
            ["raised 0 own bad", "raised 1 own bad", "exit 0 0", "exit 1 1"],
            Failure(1, 1, cause="bad"),
        ),
    ],
)
def test_the_first_cause_is_found(events: list[str], failure: Failure | None) -> None:
    assert first_failure(*events).failure() == failure


def test_the_cause_is_what_the_rank_raised() -> None:
    raised = ["raised 1 own ValueError: bad  data", "exit 1 1"]
    assert first_failure(*raised).failure() == Failure(1, 1, cause="ValueError: bad data")
    # What was raised and caught before a signal, or another exit code, is no cause.
    for code in (137, 3):
        assert first_failure("raised 1 own ValueError", f"exit 1 {code}").failure() == Failure(
            1, code
        )


def test_of_ranks_that_have_raised_the_same_none_is_named_as_the_first() -> None:
    """Such as all that have forgotten `init`."""
    same = [f"raised {rank} own ValueError: x" for rank in (2, 1)]
    heard = first_failure(*same, "raised 0 own KeyError", "close 0", "exit 2 1", "exit 1 143")
    assert heard.failure() == Failure(1, 1, cause="ValueError: x", alike=(1, 2))
    assert str(heard.failure()) == "ranks 1-2 failed alike: ValueError: x (exit code 1)"


@pytest.mark.parametrize("ranks", [(0, 1), (1, 0)])
@pytest.mark.parametrize("kind", ["internal", "own"])
def test_ranks_that_disagree_have_failed_alike(ranks: tuple[int, int], kind: str) -> None:
    """In whichever order the launcher hears of them; one may have hung until the job's end."""
    started = [f"start {rank} 1{rank} here" for rank in (0, 1)]
    raised = [f"raised {rank} {kind} HorovodInternalError: shapes" for rank in ranks]
    heard = first_failure(
        *started, *raised, f"exit {ranks[0]} 1", "close 0", f"exit {ranks[1]} 143"
    )
    said = "all 2 ranks failed alike: HorovodInternalError: shapes (exit code 1)"
    assert str(heard.failure()) == said


def test_what_is_running() -> None:
    heard = first_failure(
        "start 0 11 here", "start 1 12 there", "start 2 13 here", "exit 2 0", "lose 0"
    )
    assert heard.running == [1]
    assert heard.here == {0, 2}


def test_a_failure_says_how() -> None:
    assert str(Failure(3, 7)) == "rank 3 failed with exit code 7"
    assert str(Failure(3, 128 + signal.SIGKILL)) == "rank 3 was killed by SIGKILL (exit code 137)"
    assert "not found" in str(Failure(3, 127))
    caused = Failure(1, 1, cause="RuntimeError: no data")
    assert str(caused) == "rank 1 failed: RuntimeError: no data (exit code 1)"
    assert str(Failure(3, 255)) == "rank 3 failed with exit code 255"


def test_each_step_comes_once_and_in_time() -> None:
    plan = Ending.begin(((1.0, ending.TERMINATE), (2.0, ending.KILL)), now=10.0)
    assert plan.next_step(10.9) is None
    assert plan.next_step(11.0) == ending.TERMINATE
    assert plan.next_step(11.0) is None
    assert plan.due == 13.0
    assert plan.next_step(13.5) == ending.KILL
    assert plan.next_step(1e9) is None
    assert plan.due == float("inf")


@pytest.mark.parametrize("plan", [ending.AFTER_SIGINT, ending.AFTER_SIGTERM, ending.AT_ONCE])
def test_after_a_signal_all_is_over_within_five_seconds(plan: ending.Plan) -> None:
    assert plan[-1][1] == ending.ABANDON
    assert sum(seconds for seconds, _ in plan) < 4.5


def test_signals_that_have_no_name() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 1) == f"signal {signal.SIGRTMIN + 1}"
    assert spell_end(-signal.SIGRTMIN - 1) == f"was killed by signal {signal.SIGRTMIN + 1}"
