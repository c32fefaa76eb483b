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
    assert "rank 3 has not submitted: t0, t1, t2, t3, t4, t5 and 2 more" in report.text
    assert inspector.next_check(0.0) == 120
    assert inspector.inspect(waiting, 100.0) is None
    assert inspector.inspect(waiting, 120.0) is not None
    assert inspector.inspect([], 1000.0) is None


def test_a_stall_ends_the_job_after_the_shutdown_time() -> None:
    inspector = StallInspector(60, 90)
    waiting = [Waiting("t", (1,), 0.0)]
    first = inspector.inspect(waiting, 61.0)
    assert first is not None and not first.shutdown
    assert inspector.inspect(waiting, 80.0) is None
    assert inspector.next_check(0.0) == 90
    last = inspector.inspect(waiting, 90.0)
    assert last is not None and last.shutdown
