"""The job as a table for a terminal: ranks by host, what their steps are made of, last events."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from hvdlite.common.base.errors import ConfigError
from hvdlite.launcher.live.snapshot import Snapshot
from hvdlite.launcher.live.stragglers import spell

EVENTS_SHOWN, EVENT_LINES = 3, 2
BAR_COLUMNS, NARROW_BAR = 20, 10
WIDE = 100  # Columns of a terminal that has room for all.
SHARE_OF_HEIGHT = 0.5  # The output of the ranks has the other lines of the terminal.
FEWEST_ROWS = 4
# The parts of a step, each with its sign in the bar.
PARTS = {"compute": "█", "data": "▒", "waited": "░"}
TIMES = ("compute", "data", "hidden", "waited")
YEAR = 365 * 24 * 3600.0


def check_rich(who: str = "--live") -> None:
    """Raise `ConfigError` where rich is missing, without which `who` cannot be."""
    try:
        import rich  # noqa: F401
    except ImportError:
        raise ConfigError(f"{who} needs rich: pip install 'hvdlite[live]'") from None


def lines_of(
    job: Snapshot, columns: int, height: int, *, share: float = SHARE_OF_HEIGHT,
    chosen: int | None = None, panel: Sequence[str] = (), title: bool = False, color: bool = True,
    whole: bool = False,
) -> list[str]:  # fmt: skip
    """Return the lines of the table of a job for a terminal of this size.

    It takes this `share` of the height, and more where the `panel` below it needs that. The rank
    that is `chosen` is marked; `title` tells which job it is. With `whole` no event is cut.
    """
    from rich.console import Console

    console = Console(
        file=io.StringIO(), width=max(columns - 1, 20), force_terminal=color, legacy_windows=False,
        color_system="standard" if color else None,
    )  # fmt: skip
    panel = panel[: max(height - FEWEST_ROWS - 4, 1)] if len(panel) > 1 else panel
    most = int(height * share) - EVENTS_SHOWN - 3 - title - (len(panel) if share == 1.0 else 0)
    with console.capture() as captured:
        if title:
            command = " ".join(job["job"]["command"])
            _print(console, f"job {job['job']['pid']}: {printable(command)}")
        _print(console, _summary(job))
        if job["ranks"]:
            console.print(_table(job, max(most, FEWEST_ROWS), chosen, columns < WIDE))
        for event in job["events"][-EVENTS_SHOWN:]:
            ago = _spell_long(job["at"] - event["at"])
            text = f"{ago} ago: {printable(event['text'])}"
            if whole or title:
                wrapped = wrap(text, console.width, subsequent_indent="    ")
                more = [] if whole else wrapped[EVENT_LINES:]
                for line in wrap(text, console.width, max_lines=EVENT_LINES) if more else wrapped:
                    _print(console, line)
            else:
                _print(console, text)
    lines = captured.get().splitlines()
    with console.capture() as captured:
        for line in panel:
            _print(console, printable(line))
    # What is higher than the terminal could not be erased.
    shown = max(height - (1 if title else 2), 1)
    return lines[: max(shown - len(panel), 1)] + captured.get().splitlines()


def _print(console: Any, line: str) -> None:
    console.print(line, no_wrap=True, overflow="ellipsis", markup=False, highlight=False)


def printable(text: str) -> str:
    """Return a text that cannot control a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def spell_bytes(count: float) -> str:
    """Return a size with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} GiB"


def _table(job: Snapshot, most: int, chosen: int | None, narrow: bool) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(
        box=None, pad_edge=False, header_style="bold", padding=(0, 1 if narrow else 2, 0, 0)
    )
    times = [name for name in TIMES if not (narrow and name == "hidden")]
    for name in ("host", "rank", "a step"):
        table.add_column(name, no_wrap=True)
    for name in ("steps/s", *(f"{PARTS.get(name, '')} {name}" for name in times), "memory", ""):
        table.add_column(name.strip(), justify="right", no_wrap=True)
    ranks = sorted(job["ranks"], key=lambda rank: (rank["host"], rank["rank"]))
    if len(ranks) > most:  # Who is slow, or chosen, is shown in any case.
        ranks = sorted(ranks, key=lambda rank: not (rank["slow"] or rank["rank"] == chosen))
        ranks = ranks[: most - 1]
    host = None
    for rank in ranks:
        style = "yellow" if rank["slow"] else ""
        if rank["rank"] == chosen:
            style += " reverse"
        row = _row(rank, times, NARROW_BAR if narrow else BAR_COLUMNS)
        first = escape(printable(rank["host"])) if rank["host"] != host else ""
        table.add_row(first, *row, style=style)
        host = rank["host"]
    if len(ranks) < len(job["ranks"]):
        table.add_row("", "...", f"{len(job['ranks']) - len(ranks)} more ranks")
    return table


def _row(rank: Snapshot, times: Sequence[str], columns: int) -> Sequence[str]:
    bar = ""
    for name, sign in PARTS.items():
        share = min(rank[name] / rank["step"], 1.0) if rank["step"] else 0.0
        bar += sign * round(columns * share)
    spelled = ["-" if rank[name] is None else spell(rank[name]) for name in times]
    speed = f"{rank['steps_a_second']:.3g}"
    memory = f"{rank['memory'] / (1 << 20):.0f} MiB"
    return [str(rank["rank"]), bar, speed, *spelled, memory, "<- slow" if rank["slow"] else ""]


def _summary(job: Snapshot) -> str:
    count = len(job["ranks"])
    if not count:
        return "no rank counts yet"
    parts = [f"{count} rank{'' if count == 1 else 's'}"]
    parts += [f"{job['steps_a_second']:.3g} steps a second"]
    progress = job["progress"]
    if progress is not None:
        parts += [f"{progress['done']:.0f} of {progress['total']:.0f} steps"]
        if progress["left"] is not None and progress["left"] > YEAR:
            parts += ["ends in more than a year"]
        elif progress["left"] is not None:
            at = time.strftime("%H:%M", time.localtime(progress["ends_at"]))
            parts += [f"ends in {_spell_long(progress['left'])}, at {at}"]
    return " | ".join(parts)


def _spell_long(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 0.0):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
