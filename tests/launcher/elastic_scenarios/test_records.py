"""What a job writes while its worlds change: timelines and the output of its workers."""

from __future__ import annotations

import json

import pytest

from tests.launcher.elastic_scenarios.jobs import check_weights
from tests.launcher.elastic_scenarios.sites import Site

pytestmark = pytest.mark.timeout(120)


def test_nothing_that_was_written_is_overwritten(site: Site) -> None:
    """Rank 1 dies, a newcomer takes its place, rank 0 dies, and another one comes."""
    logs, line = site.folder / "logs", site.folder / "line.json"
    faults = [
        {"worker": 1, "place": "idle", "step": 3},
        {"worker": 0, "place": "between collectives", "step": 9},
    ]
    outcome = site.run(
        "train_numpy", *site.flags(2), "--output-filename", str(site.inside / logs.name),
        "--timeline-filename", str(site.inside / line.name), faults=faults, STEPS=16, HOLD="6 2",
    )  # fmt: skip
    check_weights(outcome, 16)
    texts = {path.name: (path / "stdout").read_text() for path in logs.iterdir()}
    assert {"rank.0", "rank.1", "rank.1.1"} <= texts.keys()
    for worker, name in ((0, "rank.0"), (1, "rank.1")):
        last = json.loads(texts[name].splitlines()[-1])
        assert (last["worker"], last["do"]) == (worker, "kill")
    assert json.loads(texts["rank.1.1"].splitlines()[-1])["result"]
    epochs = sorted(outcome.worlds())
    events = json.loads(line.read_text())
    marks = [event["args"]["world"] for event in events if event.get("name") == "RESET"]
    # The worker that was rank 0 wrote it until it died, and the file was whole at any moment; its
    # last lines may be missing. The next rank 0 began a file of its own.
    of_first = [e for e, members in outcome.worlds().items() if 0 in members]
    assert len(of_first) == 3
    assert marks in ([2], [2, 3])
    later = next(epoch for epoch in epochs if epoch not in of_first)
    events = json.loads((site.folder / f"line.world{later}.json").read_text())
    assert any(event.get("name") == "ALLREDUCE" for event in events)
