"""The job as a table for a terminal: ranks by host, what their steps are made of, last events."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.live.job_view import JobView, RankView
from hvdlite.launcher.live.stragglers import spell

EVENTS_SHOWN = 3
BAR_COLUMNS = 20
SHARE_OF_HEIGHT = 0.5  # The output of the ranks has the other lines of the terminal.
FEWEST_ROWS = 4
# The parts of a step, each with its sign in the bar.
PARTS = (("compute", "█"), ("data", "▒"), ("exchange_waited", "░"))


def check_rich() -> None:
    """Raise `ConfigError` where rich is missing."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise ConfigError("--live needs rich: pip install 'hvdlite[live]'") from None


def lines_of(job: JobView, now: float, columns: int, height: int) -> list[str]:
    """Return the lines of the table for a terminal of this size."""
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=max(columns - 1, 20), force_terminal=True, legacy_windows=False
    )
    most = max(int(height * SHARE_OF_HEIGHT) - EVENTS_SHOWN - 3, FEWEST_ROWS)
    with console.capture() as captured:
        console.print(_summary(job, now), no_wrap=True, overflow="ellipsis", highlight=False)
        if job.ranks:
            console.print(_table(job, now, most))
        for event in list(job.events)[-EVENTS_SHOWN:]:
            text = f"{_spell_long(now - event.at)} ago: {event.text}"
            console.print(text, no_wrap=True, overflow="ellipsis", markup=False, highlight=False)
    # What is higher than the terminal could not be erased.
    return captured.get().splitlines()[: max(height - 2, 1)]


def _table(job: JobView, now: float, most: int) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("host", "rank"):
        table.add_column(name, no_wrap=True)
    parts = " ".join(f"{sign} {name.removeprefix('exchange_')}" for name, sign in PARTS)
    table.add_column(parts, no_wrap=True)
    for name in ("steps/s", "compute", "data", "hidden", "waited", "memory", ""):
        table.add_column(name, justify="right", no_wrap=True)
    ranks = sorted(job.ranks.values(), key=lambda rank: (rank.host, rank.rank))
    current = job.watch.current
    slow = set(current.ranks) if current is not None else set()
    if len(ranks) > most:  # Who is slow is shown in any case.
        ranks = sorted(ranks, key=lambda rank: rank.rank not in slow)[: most - 1]
    host = None
    for rank in ranks:
        style = "yellow" if rank.rank in slow else None
        table.add_row(*_row(rank, now, rank.host != host, rank.rank in slow), style=style)
        host = rank.host
    if len(ranks) < len(job.ranks):
        table.add_row("", "...", f"{len(job.ranks) - len(ranks)} more ranks")
    return table


def _row(rank: RankView, now: float, first: bool, slow: bool) -> Sequence[str]:
    from rich.markup import escape

    changes = rank.changes()
    steps = changes.get("steps_total", 0.0)
    each = {
        name: changes.get(f"{name}_seconds_total", 0.0) / steps if steps else 0.0
        for name in ("step", "compute", "data", "exchange_hidden", "exchange_waited")
    }
    bar = ""
    for name, sign in PARTS:
        share = min(each[name] / each["step"], 1.0) if each["step"] else 0.0
        bar += sign * round(BAR_COLUMNS * share)
    times = [
        spell(each[name]) if steps else "-"
        for name in ("compute", "data", "exchange_hidden", "exchange_waited")
    ]
    speed = f"{rank.steps_a_second(now):.3g}"
    memory = f"{rank.values.get('memory_bytes', 0.0) / (1 << 20):.0f} MiB"
    host = escape(rank.host) if first else ""
    return [host, str(rank.rank), bar, speed, *times, memory, "<- slow" if slow else ""]


def _summary(job: JobView, now: float) -> str:
    ranks = job.in_order()
    if not ranks:
        return "no rank counts yet"
    speeds = [rank.steps_a_second(now) for rank in ranks]
    parts = [f"{len(ranks)} rank{'' if len(ranks) == 1 else 's'}"]
    parts += [f"{sum(speeds) / len(speeds):.3g} steps a second"]
    first = ranks[0]
    total = first.values.get("progress_total_steps", 0.0)
    if total:
        done = first.values.get("progress_steps", 0.0)
        parts += [f"{done:.0f} of {total:.0f} steps"]
        made, seconds = first.changes().get("progress_steps", 0.0), first.seconds
        if made > 0 and seconds > 0 and total > done:
            left = (total - done) * seconds / made
            at = time.strftime("%H:%M", time.localtime(time.time() + left))
            parts += [f"ends in {_spell_long(left)}, at {at}"]
    return " | ".join(parts)


def _spell_long(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
