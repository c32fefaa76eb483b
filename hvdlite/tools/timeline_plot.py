"""A picture of a timeline: tracks as rows, their spans as coloured bars. Needs matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdlite.common.timeline.chrome_trace import ENGINE_TRACK, NEGOTIATE_PREFIX, SEGMENT_TRACK
from hvdlite.tools.drawing import load_matplotlib
from hvdlite.tools.timeline_reader import Event, Head, TimelineFormatError

NEGOTIATION_COLOUR = "#f2c894"
COLLECTIVE_COLOUR = "#9ec5e8"
COLOURS = (
    "#2f6db0", "#d1495b", "#3c9d6f", "#8a5fb0", "#c98a1b", "#4aa8b5", "#7d6a58", "#b04a8c",
    "#6b7f2a", "#5a6b8c",
)  # fmt: skip
ENGINE_STATE_COLOURS = {"WAIT": "#e4e4e4"}
NAME_CHARACTERS = 44  # of a row's label

LABEL_SHARE = 0.035  # of the picture's width: a narrower bar gets no text
MERGED_NAME = re.compile(r"^rank \d+: ")

Window = tuple[float | None, float | None]  # first and last millisecond; None: no limit


@dataclass
class Span:
    """A bar; times are in microseconds."""

    start: float
    end: float
    name: str
    depth: int  # 0: directly in its track
    bytes: int | None = None


@dataclass
class Row:
    """A track of the picture."""

    name: str
    spans: list[Span] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)  # a rank became ready

    @property
    def tensor(self) -> str:
        """The name without the rank that a merge has put before it."""
        return MERGED_NAME.sub("", self.name)

    @property
    def order(self) -> int:
        """The engine and the segments stand above the tensors."""
        return {ENGINE_TRACK: 0, SEGMENT_TRACK: 1}.get(self.tensor, 2)


def collect(events: Iterable[Event], window: Window = (None, None)) -> list[Row]:
    """The rows of a picture of what happened in `window`: engine, segments, then tensors."""
    low = float("-inf") if window[0] is None else window[0] * 1000
    high = float("inf") if window[1] is None else window[1] * 1000
    head, rows, stacks = Head(), {}, {}  # type: Head, dict[int, Row], dict[int, list[Span]]
    last = 0.0
    for event in events:
        head.read(event)
        pid, now, phase = event.get("pid"), event.get("ts", 0), event.get("ph")
        last = max(last, now)
        if pid not in head.names:
            continue
        row = rows.setdefault(pid, Row(head.names[pid]))
        stack = stacks.setdefault(pid, [])
        if phase == "X" and low <= now <= high:
            row.ticks.append(now)
        elif phase == "B" and now <= high:
            size = event.get("args", {}).get("bytes")
            stack.append(Span(now, float("inf"), str(event.get("name")), len(stack), size))
        elif phase == "E" and stack:
            _finish(row, stack.pop(), now, low)
    for pid, stack in stacks.items():
        for span in stack:
            _finish(rows[pid], span, last, low)
    return _sorted([row for row in rows.values() if row.spans])


def _sorted(rows: list[Row]) -> list[Row]:
    """The engine first; a tensor's rows stand together, the tensor that came first on top."""
    begins: dict[str, float] = {}
    for row in rows:
        first = min(span.start for span in row.spans)
        begins[row.tensor] = min(first, begins.get(row.tensor, first))
    return sorted(rows, key=lambda row: (row.order, begins[row.tensor], len(row.name), row.name))


def _finish(row: Row, span: Span, end: float, low: float) -> None:
    span.end = end
    if end >= low:
        row.spans.append(span)


def draw(
    events: Iterable[Event], output: str, window: Window, tensors: int, title: str = ""
) -> None:
    """Draw `events` into the image file `output`, with at most `tensors` rows of tensors.

    Raises `ImportError` without matplotlib and `TimelineFormatError` when nothing is to be drawn.
    """
    figure_class, patch_class = load_matplotlib("plot")
    rows = collect(events, window)
    special = [row for row in rows if row.order < 2]
    plain = [row for row in rows if row.order == 2]
    shown = special + plain[:tensors]
    if not shown:
        raise TimelineFormatError("nothing happened in this part of the timeline")
    low = min(span.start for row in shown for span in row.spans)
    high = max(span.end for row in shown for span in row.spans)
    figure = figure_class(figsize=(12, 1.6 + 0.27 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    colours = _Colours()
    for index, row in enumerate(shown):
        _draw_row(axes, index, row, colours, low, LABEL_SHARE * (high - low) / 1000)
    _label(axes, shown, len(plain) - tensors, title)
    if window[0] is not None:
        axes.set_xlim(left=max(0.0, window[0] - low / 1000))
    if window[1] is not None:
        axes.set_xlim(right=window[1] - low / 1000)
    patches = [patch_class(color=colour, label=name) for name, colour in colours.used.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(output, dpi=130)


class _Colours:
    """A colour for each name, handed out in the order in which they come."""

    def __init__(self) -> None:
        self.used: dict[str, str] = {}
        self._next = 0

    def of(self, row: Row, span: Span) -> str:
        """The colour of `span`, and its name into the legend."""
        if row.order == 0:
            return self._named(f"engine: {span.name}", ENGINE_STATE_COLOURS.get(span.name))
        if span.name.startswith(NEGOTIATE_PREFIX):
            return self._named("negotiation", NEGOTIATION_COLOUR)
        if span.depth == 0:
            return self._named("collective", COLLECTIVE_COLOUR)
        return self._named(span.name, None)

    def _named(self, name: str, fixed: str | None) -> str:
        if name not in self.used:
            if fixed is None:
                fixed = COLOURS[self._next % len(COLOURS)]
                self._next += 1
            self.used[name] = fixed
        return self.used[name]


def _size(nbytes: int) -> str:
    if nbytes < 2**20:
        return f"{nbytes / 2**10:.1f} KiB"
    return f"{nbytes / 2**20:.1f} MiB"


def _draw_row(
    axes: Any, index: int, row: Row, colours: _Colours, low: float, labelled: float
) -> None:
    """Bars from `low` (us) on; segments longer than `labelled` (ms) show their bytes."""
    for span in sorted(row.spans, key=lambda span: span.depth):
        height = 0.8 / (1 + span.depth) ** 0.8
        start, width = (span.start - low) / 1000, (span.end - span.start) / 1000
        colour = colours.of(row, span)
        axes.broken_barh([(start, width)], (index - height / 2, height), facecolors=colour)
        if span.bytes is not None and width > labelled:
            middle = start + width / 2
            axes.text(middle, index, _size(span.bytes), fontsize=6, va="center", ha="center")
    ticks = [(tick - low) / 1000 for tick in row.ticks]
    axes.vlines(ticks, index - 0.4, index + 0.4, colors="#8a4b08", linewidth=0.8)


def _label(axes: Any, rows: list[Row], left_out: int, title: str) -> None:
    names = [
        row.name if len(row.name) <= NAME_CHARACTERS else "…" + row.name[-NAME_CHARACTERS + 1 :]
        for row in rows
    ]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlabel("ms" + (f"   ({left_out} more tensors are not shown)" if left_out > 0 else ""))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(title, fontsize=10)
