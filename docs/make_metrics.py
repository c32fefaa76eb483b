"""Writes the table of metrics into docs/live_view.md: python docs/make_metrics.py"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hvdlite.common.base.metrics import JOB_METRICS, METRICS, Metric

PAGE = Path(__file__).parent / "live_view.md"
START, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"
OF_JOB = "\nOf the job, for Prometheus alone:\n"


def page(text: str) -> str:
    """Return the page with the table as it should be."""
    before, rest = text.split(START)
    tables = table(METRICS.values()) + OF_JOB + table(JOB_METRICS) + "\n"
    return before + START + tables + END + rest.split(END)[1]


def table(metrics: Iterable[Metric]) -> str:
    """Return the table of some metrics."""
    rows = [
        f"| `{each.name}`{f' (by {each.label})' if each.label else ''} | {each.help} |\n"
        for each in metrics
    ]
    return "\n| name | meaning |\n|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
