"""Requests to a job, whatever comes, and whatever its ranks answer."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from hvdlite.common.connections.frames import pack
from hvdlite.common.connections.loop import Loop
from hvdlite.common.connections.order_lines import pack_answer, unpack_order
from hvdlite.launcher.inspection.asking import Asking
from hvdlite.launcher.inspection.requests import Requests
from hvdlite.launcher.live.job_view import JobView
from hvdlite.launcher.live.keyboard import ENTER
from hvdlite.launcher.live.snapshot import snapshot
from hvdlite.launcher.live.viewer import Viewer


def answers(request: Any, *rank_says: Any) -> dict[str, Any]:
    """What is answered to a request where rank 0 answers this, and then that."""
    loop, found, job = Loop(), list[dict[str, Any]](), JobView()
    events = list[str]()
    job.take("a", 7, '[1,0,1,"",{}]', 0.0)

    def give(number: int, line: str) -> str:
        order = unpack_order(line)
        assert order is not None
        for each in rank_says:
            for part in pack_answer(order.number, each):
                loop.post(partial(asking.receive, number, part))
        return ""

    asking = Asking(loop, give)
    requests = Requests(job, asking, lambda: {"ranks": []}, events.append)
    requests.about = {"pid": 3, "directory": "/job"}
    requests.make(request, found.append)
    while not found or loop._posted:
        loop.run_once(1.0)
    loop.close()
    assert len(found) == 1
    return found[0] | ({"event": events[0]} if events else {})


def shown(request: list[Any], answer: dict[str, Any]) -> list[str]:
    """What one who looks is shown of an answer."""
    viewer = Viewer(lambda _, done: done(answer), lambda: None)
    viewer.chosen = 0
    viewer.job = {"ranks": [{"host": "a", "rank": 0, "slow": False, "tensor": "w"}]}
    for key in {"stack": ["s"], "tensor": ["t", ENTER], "timeline": ["w"]}[request[0]]:
        viewer.press(key)
    return viewer.panel


def test_what_is_answered() -> None:
    assert answers(["look"], None) == {"ranks": [], "job": {"pid": 3, "directory": "/job"}}
    assert answers(["stack", 0], {"stack": "x"}) == {"stack": "x"}
    assert answers(["stack", 5], {}) == {"error": "rank 5 has not been heard of"}
    assert answers(["stack", 0], {"error": "no"}) == {"error": "rank 0: no"}
    runs = {"name": "allreduce.w", "runs": [[0.0, 1.0, 2.0, 5, 1]]}
    assert answers(["tensor", "w"], runs)["calls"][0]["bytes"] == 5
    begun, written = {"begun": "/job/x.json"}, {"file": "/job/x", "steps": 9, "seconds": 30.0}
    answer = {"file": "/job/x.json", "host": "a", "steps": 9}
    assert answers(["timeline", 9], begun) == answer
    answer["event"] = "rank 0 has written 9 steps to x"
    assert answers(["timeline", 9], begun, written) == answer
    late = answers(["timeline", 10], begun, written)["event"]
    assert late == "rank 0 has written 9 steps to x, and then came none for 30 s"
    failed = answers(["timeline", 10], begun, {"error": "disk full"})["event"]
    assert failed == "the timeline of rank 0: rank 0: disk full"
    assert "too long" in answers(["tensor", "\u20ac" * 400], {})["error"]


TEXTS = st.text(st.characters(), max_size=5)  # With halves of characters.
VALUES = st.none() | st.integers() | st.floats() | TEXTS | st.lists(st.floats())
ANSWERS = VALUES | st.dictionaries(
    st.sampled_from(["runs", "name", "stack", "file", "steps", "seconds", "error", "others"]),
    VALUES | st.lists(st.lists(VALUES, max_size=6), max_size=3),
)  # fmt: skip


@settings(max_examples=60)
@given(
    request_=st.sampled_from([["stack", 0], ["tensor", "w"], ["timeline", 3]]), says=ANSWERS
)  # fmt: skip
@example(["stack", 0], "\ud800")
def test_whatever_a_rank_says(request_: list[Any], says: Any) -> None:
    job = JobView()
    job.take("a", 0, json.dumps([1, 0, 1, says, {}]), 0.0)
    pack([snapshot(job, 0.0, 0.0)])
    if request_[0] == "timeline":
        assert isinstance(answers(request_, {"begun": says}, says)["event"], str)
    lines = shown(request_, answers(request_, says))
    assert lines and all(isinstance(line, str) for line in lines)


@settings(max_examples=60)
@given(st.lists(VALUES, max_size=4) | st.tuples(st.sampled_from(["stack", "tensor"]), VALUES))
def test_whatever_is_asked(request_: Any) -> None:
    answers(list(request_), {})
