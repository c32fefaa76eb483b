"""The job as a table for a terminal: ranks by host, what their steps are made of, last events."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.live.snapshot import Snapshot
from hvdlite.launcher.live.stragglers import spell

EVENTS_SHOWN = 3
BAR_COLUMNS = 20
SHARE_OF_HEIGHT = 0.5  # The output of the ranks has the other lines of the terminal.
FEWEST_ROWS = 4
# The parts of a step, each with its sign in the bar.
PARTS = (("compute", "█"), ("data", "▒"), ("waited", "░"))
TIMES = ("compute", "data", "hidden", "waited")


def check_rich() -> None:
    """Raise `ConfigError` where rich is missing."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise ConfigError("--live needs rich: pip install 'hvdlite[live]'") from None


def lines_of(job: Snapshot, columns: int, height: int) -> list[str]:
    """Return the lines of the table of a job for a terminal of this size."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=max(columns - 1, 20), force_terminal=True, legacy_windows=False
    )
    most = max(int(height * SHARE_OF_HEIGHT) - EVENTS_SHOWN - 3, FEWEST_ROWS)
    with console.capture() as captured:
        console.print(_summary(job), no_wrap=True, overflow="ellipsis", highlight=False)
        if job["ranks"]:
            console.print(_table(job, most))
        for event in job["events"][-EVENTS_SHOWN:]:
            text = f"{_spell_long(job['at'] - event['at'])} ago: {event['text']}"
            console.print(text, no_wrap=True, overflow="ellipsis", markup=False, highlight=False)
    # What is higher than the terminal could not be erased.
    return captured.get().splitlines()[: max(height - 2, 1)]


def _table(job: Snapshot, most: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("host", "rank"):
        table.add_column(name, no_wrap=True)
    parts = " ".join(f"{sign} {name}" for name, sign in PARTS)
    table.add_column(parts, no_wrap=True)
    for name in ("steps/s", *TIMES, "memory", ""):
        table.add_column(name, justify="right", no_wrap=True)
    ranks = sorted(job["ranks"], key=lambda rank: (rank["host"], rank["rank"]))
    if len(ranks) > most:  # Who is slow is shown in any case.
        ranks = sorted(ranks, key=lambda rank: not rank["slow"])[: most - 1]
    host = None
    for rank in ranks:
        style = "yellow" if rank["slow"] else None
        table.add_row(*_row(rank, rank["host"] != host), style=style)
        host = rank["host"]
    if len(ranks) < len(job["ranks"]):
        table.add_row("", "...", f"{len(job['ranks']) - len(ranks)} more ranks")
    return table


def _row(rank: Snapshot, first: bool) -> Sequence[str]:
    from rich.markup import escape

    bar = ""
    for name, sign in PARTS:
        share = min(rank[name] / rank["step"], 1.0) if rank["step"] else 0.0
        bar += sign * round(BAR_COLUMNS * share)
    times = ["-" if rank[name] is None else spell(rank[name]) for name in TIMES]
    speed = f"{rank['steps_a_second']:.3g}"
    memory = f"{rank['memory'] / (1 << 20):.0f} MiB"
    host = escape(rank["host"]) if first else ""
    return [
        host, str(rank["rank"]), bar, speed, *times, memory, "<- slow" if rank["slow"] else ""
    ]  # fmt: skip


def _summary(job: Snapshot) -> str:
    count = len(job["ranks"])
    if not count:
        return "no rank counts yet"
    parts = [f"{count} rank{'' if count == 1 else 's'}"]
    parts += [f"{job['steps_a_second']:.3g} steps a second"]
    progress = job["progress"]
    if progress is not None:
        parts += [f"{progress['done']:.0f} of {progress['total']:.0f} steps"]
        if progress["left"] is not None:
            at = time.strftime("%H:%M", time.localtime(progress["ends_at"]))
            parts += [f"ends in {_spell_long(progress['left'])}, at {at}"]
    return " | ".join(parts)


def _spell_long(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
