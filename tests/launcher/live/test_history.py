"""The points of time that are kept of a job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hvdlite.launcher.live.history import FIELDS, MOST_POINTS, History


def look(at: float, *compute: float | None, first: int = 0) -> dict[str, Any]:
    """A look at ranks whose steps take 1 s, of which they compute so long and wait the rest."""
    return {
        "at": at,
        "ranks": [
            {
                **dict.fromkeys(FIELDS, 0.0),
                "rank": first + rank,
                "step": 1.0,
                "compute": seconds,
                "waited": None if seconds is None else 1.0 - seconds,
                "memory": 1000.0 * rank,
            }
            for rank, seconds in enumerate(compute)
        ],
    }


def test_a_job_and_one_of_its_ranks() -> None:
    history = History()
    history.add({"at": 1.0, "ranks": []})  # Nobody is there yet.
    history.add(look(2.0, 0.25, None))
    history.add(look(3.0, 0.5, 0.75))
    found = json.loads(json.dumps(history.as_dict(1, 7), allow_nan=False))
    assert found["at"] == [2.0, 3.0]
    job = found["job"]
    assert job["compute"] == [0.25, 0.625]
    assert (job["share_least"], job["share"], job["share_most"]) == (
        [0.75, 0.25], [0.75, 0.375], [0.75, 0.5]
    )  # fmt: skip
    assert (job["memory_least"], job["memory_most"]) == ([0, 0], [1000, 1000])
    assert list(found["ranks"]) == ["1"]
    assert found["ranks"]["1"]["compute"] == [None, 0.75]


def test_it_is_thinned_out_and_its_means_stay() -> None:
    history = History()
    count = 10 * MOST_POINTS + 7
    for second in range(count):
        history.add(look(second, second / count, 1.0 - second / count))
    found = history.as_dict(0, 1)
    at = found["at"]
    assert MOST_POINTS / 2 <= len(at) <= MOST_POINTS
    assert at[-1] == count - 1, "what came last is there at once"
    whole = at[:-1]  # The last point is the mean of fewer looks.
    gap = whole[1] - whole[0]
    assert gap == 16 and whole == [gap * (k + 1) - 1 for k in range(len(whole))]
    for k, moment in enumerate(whole):  # The mean of the looks since the point before.
        mean = (moment - (gap - 1) / 2) / count
        assert found["ranks"]["0"]["compute"][k] == pytest.approx(mean, abs=1e-3)
        assert found["job"]["compute"][k] == pytest.approx(0.5, abs=1e-3)
        assert found["job"]["share_most"][k] == pytest.approx(max(mean, 1 - mean), abs=3e-3)


def test_many_ranks_take_a_few_mebibytes() -> None:
    history = History()
    ranks = look(0.0, *[0.5] * 1000)["ranks"]
    for second in range(300):
        history.add({"at": float(second), "ranks": ranks})
    assert len(history.as_dict()["at"]) > 60
    assert history.nbytes < 5 << 20


def test_ranks_that_come_later_and_go() -> None:
    history = History()
    for second in range(300):
        history.add(look(second, *[0.5] * (1 if second < 100 else 3)))
    for second in range(300, 400):
        history.add(look(second, 0.5))
    ranks = history.as_dict(*history.ranks)["ranks"]
    known = [value is not None for value in ranks["2"]["compute"]]
    assert not known[0] and not known[-1] and any(known)
    assert None not in ranks["0"]["compute"]
