"""Which rank failed first, when a job ends step by step, and how output is put into lines."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher import termination_plan as ending
from hvdlite.launcher.first_failure import Failure, Verdict
from hvdlite.launcher.output import Output
from hvdlite.launcher.termination_plan import Ending


def verdict(*events: str) -> Verdict:
    heard = Verdict()
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
        # Rank 0 suffered; that we ended rank 1 is not the reason.
        (["raised 0 internal", "exit 0 1", "close 0", "exit 1 143"], Failure(0, 1)),
        # The same; rank 0 took longer to end than rank 1.
        (["raised 0 internal", "close 0", "exit 1 143", "exit 0 1"], Failure(0, 1)),
        (["start 0 11 here", "lose 0", "exit 1 1"], Failure(0, 137, lost=True)),
        # Rank 1 raised, and mpirun ended it with its shell because rank 0 had failed.
        (["raised 1 own", "raised 0 internal", "exit 0 1", "close 0", "lose 1"], Failure(1, 1)),
    ],
)
def test_the_first_cause_is_found(events: list[str], failure: Failure | None) -> None:
    assert verdict(*events).failure() == failure


def test_what_is_running() -> None:
    heard = verdict("start 0 11 here", "start 1 12 there", "start 2 13 here", "exit 2 0", "lose 0")
    assert heard.running == [1]
    assert heard.here == {0, 2}


def test_a_failure_says_how() -> None:
    assert str(Failure(3, 7)) == "rank 3 failed with exit code 7"
    assert str(Failure(3, 128 + signal.SIGKILL)) == "rank 3 was killed by SIGKILL (exit code 137)"
    assert "not found" in str(Failure(3, 127))
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


def test_lines_are_whole_and_carry_their_rank(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(2, None, timestamps=False)
    output.feed(0, "stdout", b"one\ntw")
    output.feed(1, "stdout", b"other\n")
    output.feed(0, "stdout", b"o\nthree")
    output.feed(1, "stderr", b"bad\n")
    output.finish()
    out, err = capfd.readouterr()
    assert out == "[0]<stdout>:one\n[1]<stdout>:other\n[0]<stdout>:two\n[0]<stdout>:three\n"
    assert err == "[1]<stderr>:bad\n"


def test_a_progress_bar_moves_on_its_line(capfd: pytest.CaptureFixture[str]) -> None:
    output = Output(1, None, timestamps=False)
    output.feed(0, "stdout", b"10%\r20%\r")
    output.feed(0, "stdout", b"\nend\r\n")
    out, _ = capfd.readouterr()
    assert out == "[0]<stdout>:10%\r[0]<stdout>:20%\r\n[0]<stdout>:end\r\n"


def test_time_comes_before_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    Output(1, None, timestamps=True).feed(0, "stdout", b"x\n")
    out, _ = capfd.readouterr()
    when, _, rest = out.partition("[")
    assert len(when) == len("Mon Nov 21 04:06:00 2026")
    assert rest == "0]<stdout>:x\n"


def test_files_hold_the_bytes_of_each_rank(tmp_path: Path) -> None:
    output = Output(11, str(tmp_path / "logs"), timestamps=False)
    output.feed(3, "stderr", b"raw\x00\xff no end")
    output.close()
    assert (tmp_path / "logs" / "rank.03" / "stderr").read_bytes() == b"raw\x00\xff no end"
    assert (tmp_path / "logs" / "rank.10" / "stdout").read_bytes() == b""


def test_files_that_cannot_be_written_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output-filename"):
        Output(2, str(tmp_path / "file"), timestamps=False)
