"""Writes the table of metrics into docs/live_view.md: python docs/make_metrics.py"""

from __future__ import annotations

from pathlib import Path

from hvdlite.common.plain.metrics import METRICS

PAGE = Path(__file__).parent / "live_view.md"
START, END = "<!-- metrics -->\n", "<!-- end of metrics -->\n"


def page(text: str) -> str:
    """Return the page with the table as it should be."""
    before, rest = text.split(START)
    rows = [
        f"| `{each.name}`{' (by collective)' if each.label else ''} | {each.help} |\n"
        for each in METRICS.values()
    ]
    table = "\n| name | meaning |\n|---|---|\n" + "".join(rows) + "\n"
    return before + START + table + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
