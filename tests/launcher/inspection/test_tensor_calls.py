"""The calls of a tensor, from what its ranks remember."""

from __future__ import annotations

from typing import Any

import pytest

from hvdlite.launcher.inspection.tensor_calls import merge


def of_rank(late: float, calls: range, error: float = 0.0) -> dict[str, Any]:
    """What a rank tells that is late with each call; its clock is wrong by `error`."""
    runs = [
        [10 * call + late + error, 10 * call + 3 + error, 10 * call + 4 + error, 100, 2]
        for call in calls
    ]
    return {"name": "allreduce.w", "runs": runs, "others": []}


def test_who_was_last() -> None:
    found = {
        0: of_rank(1.0, range(5)), 1: of_rank(2.5, range(1, 6), 0.1), 2: of_rank(0.0, range(5)),
        3: {"error": "does not answer"},
    }  # fmt: skip
    answer = merge("w", found, 1000.0)
    assert (answer["name"], answer["ranks"]) == ("allreduce.w", 3)
    newest, *_, oldest = answer["calls"]
    assert len(answer["calls"]) == 5
    assert (newest["last"], newest["waiting"]) == (1, 2)
    assert (newest["waited"], newest["seconds"]) == pytest.approx((2.6, 1.0))
    assert (oldest["last"], oldest["ago"]) == (0, 40), "rank 1 remembers no such call"


def test_nobody_knows_it() -> None:
    empty = {"name": "", "runs": [], "others": ["allreduce.w1", "allreduce.w2"]}
    answer = merge("w", {0: empty, 1: empty}, 1000.0)
    assert (answer["calls"], answer["others"]) == ([], ["allreduce.w1", "allreduce.w2"])
    assert merge("w", {}, 0.0) == {"error": "no rank has been heard of"}
    assert "no rank can tell: x" in merge("w", {0: {"error": "x"}}, 0.0)["error"]
    some_have = {0: {**empty, "name": "allreduce.w", "waits": 12.5}, 1: {**empty, "waits": None}}
    answer = merge("w", some_have, 0.0)
    assert (answer["name"], answer["calls"]) == ("allreduce.w", [])
    assert (answer["asked"], answer["waits"]) == ([0, 1], [[0, 12.5]])
    assert merge("w", {0: {"runs": [["a"]], "name": 3}}, 0.0)["calls"] == []
