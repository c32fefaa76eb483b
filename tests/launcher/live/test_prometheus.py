"""The page for Prometheus, and the dashboard that reads it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdlite.common.base.errors import ConfigError
from hvdlite.common.base.metrics import JOB_METRICS, METRICS, PREFIX, Sample, pack
from hvdlite.launcher.command_line.live_options import LiveOptions
from hvdlite.launcher.live.job_view import FAILURE, JobView
from hvdlite.launcher.live.live_view import LiveView
from hvdlite.launcher.live.prometheus import PrometheusPage
from hvdlite.launcher.live.stragglers import Straggler
from hvdlite.launcher.processes.console import Console
from hvdlite.launcher.processes.event_loop import EventLoop

DASHBOARD = Path(__file__).parents[3] / "deploy" / "grafana" / "dashboard.json"
NAMES = {PREFIX + each.name: each for each in (*METRICS.values(), *JOB_METRICS)}


def full_job() -> JobView:
    """A job of two ranks with all numbers."""
    job = JobView()
    for rank in range(2):
        values = {name: 10.0 * rank + 1 for name, each in METRICS.items() if not each.label}
        for collective in ("allreduce", "broadcast"):
            values |= {f"{n}.{collective}": 3.0 for n, each in METRICS.items() if each.label}
        assert job.take('ho"st\\', rank, pack(Sample(rank, 2, values)), 5.0)
    job.note(FAILURE, "a rank", 5.5)
    job.watch.current = Straggler((1,), "host", 0.038, 0.31, "data", "rank 1 ...")
    return job


def families(page: bytes) -> dict[str, Any]:
    parser = pytest.importorskip("prometheus_client.parser")
    return {each.name: each for each in parser.text_string_to_metric_families(page.decode())}


def test_all_numbers_of_all_ranks() -> None:
    pytest.importorskip("prometheus_client")
    found = families(PrometheusPage(full_job(), lambda: 7.0).text())
    assert {n.removesuffix("_total") for n in NAMES} == {n.removesuffix("_total") for n in found}
    for name, metric in NAMES.items():
        family = found[name.removesuffix("_total") if name.endswith("_total") else name]
        assert family.type == ("counter" if metric.counts else "gauge"), name
        assert family.documentation == metric.help
        assert {sample.name for sample in family.samples} == {name}
    steps = {s.labels["rank"]: s.value for s in found["hvdlite_steps"].samples}
    assert steps == {"0": 1.0, "1": 11.0}
    assert found["hvdlite_steps"].samples[0].labels["host"] == 'ho"st\\'
    slow = found["hvdlite_straggler_seconds"].samples
    assert [(s.labels["rank"], s.labels["cause"], s.value) for s in slow] == [("1", "data", 0.038)]
    kinds = {s.labels["kind"]: s.value for s in found["hvdlite_events"].samples}
    assert kinds["failure"] == 1 and kinds["stall"] == 0
    assert found["hvdlite_age_seconds"].samples[0].value == 2.0
    assert {s.labels["collective"] for s in found["hvdlite_collective_bytes"].samples} == {
        "allreduce", "broadcast"
    }  # fmt: skip


def test_a_straggler_of_the_world_before_is_not_shown() -> None:
    pytest.importorskip("prometheus_client")
    job = full_job()
    assert job.take("host", 0, pack(Sample(0, 1, {"world": 20.0})), 6.0)  # Rank 1 is gone.
    assert b"hvdlite_straggler_seconds{" not in PrometheusPage(job, lambda: 6.0).text()


def test_names_follow_the_conventions() -> None:
    """Base units alone, at the end of the name, and `_total` for what only grows."""
    for name in NAMES:
        assert re.fullmatch(r"hvdlite(_[a-z]+)+", name)
        assert not re.search(r"(_ms|_milliseconds|_kb|_mb|_percent)(_total)?$", name), name


def test_it_is_made_once_a_second() -> None:
    pytest.importorskip("prometheus_client")
    now = [5.0]
    job = full_job()
    page = PrometheusPage(job, lambda: now[0])
    first = page.text()
    job.note(FAILURE, "another", 5.5)
    now[0] = 5.9
    assert page.text() is first
    now[0] = 6.0
    assert b'events_total{kind="failure"} 2.0' in page.text()


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match=r"--metrics-port .* pip install 'hvdlite\[live\]'"):
        PrometheusPage(JobView(), lambda: 0.0)


def test_a_port_that_is_taken() -> None:
    pytest.importorskip("prometheus_client")
    loop, said = EventLoop(), list[str]()
    first = LiveView(LiveOptions(0), loop, said.append, Console())
    port = int(re.search(r"http://127\.0\.0\.1:(\d+)/metrics", said[0])[1])  # type: ignore[index]
    with pytest.raises(ConfigError, match=rf"--metrics-port {port}: .*in use"):
        LiveView(LiveOptions(port), loop, said.append, Console())
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.1"):
        LiveView(LiveOptions(0, "203.0.113.1"), loop, said.append, Console())
    first.close()
    loop.close()


def test_the_dashboard_asks_for_names_and_labels_that_there_are() -> None:
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in board["templating"]["list"]]
    asked = set(re.findall(r"hvdlite_\w+", " ".join(queries)))
    assert len(asked) > 12
    assert asked <= set(NAMES)
    labels = {"rank", "host", "job", "kind", "collective"}
    for query in queries:
        for group in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", group)) <= labels
        for name in re.findall(r"(hvdlite_\w+)\{[^}]*\}\[", query):
            assert NAMES[name].counts, f"{name} is no counter: rate() means nothing"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
