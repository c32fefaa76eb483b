"""What the launcher makes of the lines of ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdlite.common.base.metrics import METRICS, Sample, pack
from hvdlite.launcher.live.job_view import MOST_EVENTS, MOST_MOMENTS, OTHER, STALL, JobView


def line(rank: int = 0, size: int = 2, tensor: str = "", **values: float) -> str:
    return pack(Sample(rank, size, values, tensor))


def test_changes_are_those_of_the_last_seconds() -> None:
    job = JobView()
    for second in range(20):  # 10 steps a second in the first ten seconds, then 4.
        steps = 10 * min(second, 10) + 4 * max(second - 10, 0)
        job.take("a", 5, line(steps_total=steps, step_seconds_total=second), 100.0 + second)
    rank = job.ranks[0]
    assert (rank.host, rank.number, rank.seconds) == ("a", 5, 6.0)
    assert rank.changes()["steps_total"] == 24
    assert rank.steps_a_second(119.5) == 4.0
    assert rank.age(119.5) == 0.5
    assert rank.steps_a_second(130.0) == 0.0, "it stands still"


def test_what_does_not_grow_only_is_a_mean_of_the_last_seconds() -> None:
    job = JobView()
    for second in range(20):  # A process that runs in each second second.
        job.take("a", 0, line(0, 1, runnable_processes=2 * (second % 2), cores=2), 1.0 * second)
    pace = job.paces(19.5)[0]
    assert (pace.seconds, pace.values["cores"]) == (6.0, 2.0)
    assert pace.values["runnable_processes"] == pytest.approx(8 / 7)
    assert "steps_total" not in pace.values


def test_who_stands_still_makes_nobody_wait_a_step() -> None:
    """Ranks that wait for ever, as rank 0 alone calls a collective, have no paces."""
    job = JobView()
    for second in range(30):
        steps = 10 * min(second, 10)
        for rank in range(2):
            values = {"steps_total": steps, "step_seconds_total": steps / 10}
            job.take("a", rank, line(rank, **values), 1.0 * second)
        assert len(job.paces(second + 0.5)) == (2 if second < 12 else 0), second


def test_slow_steps_are_counted_over_a_longer_time() -> None:
    job = JobView()
    for second in range(121):  # A step takes 20 s.
        job.take(
            "a",
            0,
            line(steps_total=second // 20, step_seconds_total=second // 20 * 20),
            float(second),
        )
    rank = job.ranks[0]
    assert rank.changes()["steps_total"] >= 3
    assert rank.steps_a_second(121.0) == 0.05
    assert len(rank._moments) <= MOST_MOMENTS


def test_who_begins_anew_is_counted_anew() -> None:
    job = JobView()
    job.take("a", 0, line(steps_total=500, step_seconds_total=50), 0.0)
    job.take("a", 0, line(steps_total=2, step_seconds_total=1), 1.0)
    assert job.ranks[0].changes()["steps_total"] == 0
    job.take("a", 7, line(steps_total=90, step_seconds_total=2), 2.0)  # Another process.
    assert job.ranks[0].changes()["steps_total"] == 0


def test_ranks_of_a_world_that_is_over_are_gone() -> None:
    job = JobView()
    for rank in range(3):
        job.take("ab"[rank // 2], rank, line(rank, 3, world=1, commit=4), 0.0)
    job.take("a", 0, line(0, 2, world=2, commit=4), 1.0)
    assert job.take("b", 2, line(2, 3, world=1, commit=4), 1.1) is None, "it comes too late"
    assert [rank.rank for rank in job.in_order()] == [0, 1]


def test_events_are_counted_and_the_last_are_kept() -> None:
    job = JobView()
    for number in range(30):
        job.note(STALL, f"{number}\n of  it", 1.0 * number)
    assert job.counted[STALL] == 30
    assert len(job.events) == MOST_EVENTS
    assert job.events[-1].text == "29 of it"
    job.note(OTHER, "no slots", 31.0)
    assert job.events[-1].text == "no slots" and job.counted.total() == 30


VALUES = st.dictionaries(
    st.sampled_from([*METRICS, "collective_calls_total.allreduce", "nothing"]),
    st.floats(allow_nan=True) | st.integers() | st.booleans() | st.text(),
)
LINES = st.text() | st.builds(
    lambda *fields: str(list(fields)).replace("'", '"'), st.integers(), st.integers(), VALUES
)


@pytest.mark.parametrize("number", ["1" + "0" * 400, "NaN", "Infinity", "-1", "true"])
def test_numbers_that_are_none(number: str) -> None:
    job = JobView()
    assert job.take("a", 0, re.sub(r"\b7(\.0)?\b", number, line(0, 1, steps_total=7)), 1.0) is None


@settings(max_examples=40)
@given(st.lists(st.tuples(LINES, st.floats(0, 100)), max_size=20), st.data())
def test_no_line_does_harm(lines: list[tuple[str, float]], data: Any) -> None:
    job = JobView()
    for text, step in lines:
        job.take("a", 0, text, step)
        numbers = st.floats(0, 1e17, allow_nan=False)
        values = data.draw(st.dictionaries(st.sampled_from(sorted(METRICS)), numbers, max_size=4))
        job.take("a", 0, line(0, 1, **values), step)
    for rank in job.in_order():
        rank.changes()
        assert rank.steps_a_second(200.0) >= 0
