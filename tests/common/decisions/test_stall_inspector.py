"""Stalls are reported once per warning time, and fail the job after the shutdown time."""

from __future__ import annotations

from hvdlite.common.decisions.stall_inspector import StallInspector, Waiting


def test_a_stall_is_reported_once_per_warning_time() -> None:
    inspector = StallInspector(60, 0)
    waiting = [Waiting(f"t{i}", (1, 3), 0.0) for i in range(8)]
    assert inspector.next_check(0.0) == 60
    assert inspector.inspect(waiting, 59.9) is None
    report = inspector.inspect(waiting, 60.0)
    assert report is not None and report.missing == (1, 3) and not report.shutdown
    assert "Rank 3 has not submitted: t0, t1, t2, t3, t4, t5 and 2 more" in report.text
    assert inspector.next_check(0.0) == 120
    assert inspector.inspect(waiting, 100.0) is None
    assert inspector.inspect(waiting, 120.0) is not None
    assert inspector.inspect([], 1000.0) is None


def test_reports_of_the_same_become_rarer_and_news_are_told_at_once() -> None:
    inspector = StallInspector(60, 0)
    same = [Waiting("t", (1,), 0.0)]
    reported = [now for now in range(3600) if inspector.inspect(same, now)]
    assert reported == [60, 120, 240, 480, 960, 1560, 2160, 2760, 3360]
    assert inspector.next_check(0.0) == 3600
    news = [*same, Waiting("u", (2,), 3600.0)]
    reported = [now for now in range(3600, 4500) if inspector.inspect(news, now)]
    assert reported == [3660, 3720, 3840, 4080]


def test_a_stall_ends_the_job_after_the_shutdown_time() -> None:
    inspector = StallInspector(60, 90)
    waiting = [Waiting("t", (1,), 0.0)]
    first = inspector.inspect(waiting, 61.0)
    assert first is not None and not first.shutdown
    assert inspector.inspect(waiting, 80.0) is None
    assert inspector.next_check(0.0) == 90
    last = inspector.inspect(waiting, 90.0)
    assert last is not None and last.shutdown


def test_a_report_in_one_line_reads_as_sentences() -> None:
    """Ranks that only suffer print the error in one line, and so does the launcher."""
    inspector = StallInspector(60, 90)
    waiting = [
        Waiting("a", (1, 2), 0.0),
        Waiting("b", (1,), 10.0),
        Waiting("join", (2,), 0.0, joined=(0,)),
    ]
    report = inspector.inspect(waiting, 90.0)
    assert report is not None
    assert " ".join(report.text.split()) == (
        "stalled for up to 90 s: 2 tensors were submitted by some ranks and not by others. "
        "A rank may have taken another branch, or failed. "
        "Rank 1 has not submitted: a, b. "
        "Rank 2 has not submitted: a. "
        "Rank 0 waits in join for rank 2. "
        "The limit of 90 s is over: the job ends, or goes on without late ranks if it is elastic."
    )
    alone = StallInspector(60, 0).inspect([Waiting("join", (2,), 0.0, joined=(0, 1))], 60.0)
    assert alone is not None and " ".join(alone.text.split()) == (
        "stalled for up to 60 s: ranks wait in join for others that do nothing. A rank may have "
        "taken another branch, or failed. Ranks 0, 1 wait in join for rank 2."
    )
