"""The job as a plain dict."""

from __future__ import annotations

import json

import pytest

from hvdlite.launcher.live.job_view import JobView
from hvdlite.launcher.live.snapshot import snapshot
from tests.launcher.live.test_table import job


def test_a_job() -> None:
    found = snapshot(job(4), 7.5, 1000.0)
    assert json.loads(json.dumps(found)) == found
    rank = found["ranks"][1]
    assert (rank["rank"], rank["host"], rank["slow"], rank["steps"]) == (1, "a", True, 70)
    assert (rank["step"], rank["compute"], rank["waited"]) == pytest.approx((0.1, 0.08, 0.02))
    assert (rank["age"], rank["steps_a_second"]) == pytest.approx((0.5, 10))
    assert [host["ranks"] for host in found["hosts"]] == [[0, 1], [2, 3]]
    assert found["events"] == [
        {"at": 994.5, "kind": "stall", "text": "[bold]x[/bold] waits"}
    ]  # fmt: skip
    assert found["progress"] == {"done": 70, "total": 6070, "left": 600, "ends_at": 1600}
    assert found["straggler"]["cause"] == "compute"


def test_nothing_is_known_yet() -> None:
    found = snapshot(JobView(), 1.0, 1000.0)
    assert (found["ranks"], found["hosts"], found["progress"]) == ([], [], None)
    view = JobView()
    view.take("a", 0, '[1,0,1,"",{"memory_bytes":5}]', 1.0)
    rank = snapshot(view, 1.0, 1000.0)["ranks"][0]
    assert (rank["step"], rank["compute"], rank["memory"]) == (None, None, 5)
