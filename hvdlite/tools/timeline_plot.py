"""A picture of a timeline: one row for each track, with spans as coloured bars.

It needs matplotlib.
"""

from __future__ import annotations

import colorsys
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hvdlite.common.timeline.chrome_trace import ENGINE_TRACK, NEGOTIATE_PREFIX, SEGMENT_TRACK
from hvdlite.tools.drawing import load_matplotlib, size
from hvdlite.tools.timeline_reader import Event, Head, TimelineFormatError, split_name

# Pictures are compared, so a name has one colour in all of them: the usual ones these.
COLOURS = {
    "negotiation": "#f2c894",
    "collective": "#9ec5e8",
    "engine: WAIT": "#e4e4e4",
    "engine: NEGOTIATE": "#c98a1b",
    "engine: EXECUTE": "#5a6b8c",
    "SHM_ALLREDUCE": "#2f6db0",
    "RING_ALLREDUCE": "#d1495b",
    "MPI_ALLREDUCE": "#b04a8c",
    "SHM_ALLGATHER": "#3c9d6f",
    "RING_ALLGATHER": "#6b7f2a",
    "SHM_BROADCAST": "#8a5fb0",
    "RING_BROADCAST": "#4aa8b5",
    "SHM_REDUCESCATTER": "#7d6a58",
}
NAME_CHARACTERS = 44  # the most of a track's name that its label shows

LABEL_SHARE = 0.035  # the share of the picture's width that a bar needs to get text

Window = tuple[float | None, float | None]  # first and last millisecond; None: no limit


@dataclass
class Span:
    """A bar of the picture; times are in microseconds."""

    start: float
    end: float
    name: str
    depth: int  # the number of spans around it
    bytes: int | None = None


@dataclass
class Track:
    """A track, which is one row of the picture."""

    name: str
    spans: list[Span] = field(default_factory=list)
    ticks: list[float] = field(default_factory=list)  # when ranks became ready

    @property
    def tensor(self) -> str:
        """The name without the rank that a merge puts before it."""
        return split_name(self.name)[1]

    @property
    def order(self) -> int:
        """The group of rows: 0 for the engine, 1 for segments, 2 for tensors below them."""
        return {ENGINE_TRACK: 0, SEGMENT_TRACK: 1}.get(self.tensor, 2)


def collect(events: Iterable[Event], window: Window = (None, None)) -> list[Track]:
    """Return the tracks with spans in `window`, in order: engine, segments, then tensors.

    Raises `TimelineFormatError` when there are none.
    """
    low = float("-inf") if window[0] is None else window[0] * 1000
    high = float("inf") if window[1] is None else window[1] * 1000
    head = Head()
    tracks: dict[int, Track] = {}
    stacks: dict[int, list[Span]] = {}
    first, last = float("inf"), 0.0
    for event in events:
        head.update(event)
        pid, now, phase = event.get("pid"), event.get("ts", 0), event.get("ph")
        last = max(last, now)
        if "ts" in event:
            first = min(first, now)
        if pid not in head.names:
            continue
        track = tracks.setdefault(pid, Track(head.names[pid]))
        stack = stacks.setdefault(pid, [])
        if phase == "X" and event.get("dur") and now <= high:
            span = Span(now, now, str(event.get("name")), 0)
            _end_span(track, span, now + event["dur"], low)
        elif phase == "X" and low <= now <= high:
            track.ticks.append(now)
        elif phase == "B" and now <= high:
            size = event.get("args", {}).get("bytes")
            stack.append(Span(now, float("inf"), str(event.get("name")), len(stack), size))
        elif phase == "E" and stack:
            _end_span(track, stack.pop(), now, low)
    for pid, stack in stacks.items():
        for span in stack:
            _end_span(tracks[pid], span, last, low)
    filled = [track for track in tracks.values() if track.spans]
    if not filled:
        covered = f"{first / 1000:g} to {last / 1000:g} ms" if first <= last else "nothing"
        raise TimelineFormatError(
            f"nothing happened in this part of the timeline, which covers {covered}"
        )
    return _sorted(filled)


def _sorted(tracks: list[Track]) -> list[Track]:
    """Sort the engine first, and the tracks of one tensor together, by the tensor's first span."""
    begins: dict[str, float] = {}
    for track in tracks:
        first = min(span.start for span in track.spans)
        begins[track.tensor] = min(first, begins.get(track.tensor, first))
    return sorted(
        tracks, key=lambda track: (track.order, begins[track.tensor], len(track.name), track.name)
    )


def _end_span(track: Track, span: Span, end: float, low: float) -> None:
    span.end = end
    if end >= low:
        track.spans.append(span)


def draw(
    events: Iterable[Event], output: str, window: Window, tensors: int, title: str = ""
) -> None:
    """Draw `events` into the image file `output`, with at most `tensors` tracks of tensors.

    The axis has the file's own times, as `window` does. Raises `ImportError` without matplotlib and
    `TimelineFormatError` when the window is empty.
    """
    figure_class, patch_class = load_matplotlib("plot")
    tracks = collect(events, window)
    not_tensors = [track for track in tracks if track.order < 2]
    of_tensors = [track for track in tracks if track.order == 2]
    shown = not_tensors + of_tensors[:tensors]
    if not shown:
        raise TimelineFormatError(f"{tensors} tensors are to be drawn, and there is no other track")
    low = min(span.start for track in shown for span in track.spans)
    high = max(span.end for track in shown for span in track.spans)
    figure = figure_class(figsize=(12, 1.6 + 0.27 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    colours: dict[str, str] = {}
    for index, track in enumerate(shown):
        _draw_track(axes, index, track, colours, LABEL_SHARE * (high - low) / 1000)
    _label(axes, shown, len(of_tensors) - tensors, title)
    if window[0] is not None:
        axes.set_xlim(left=max(low / 1000, window[0]))
    if window[1] is not None:
        axes.set_xlim(right=window[1])
    patches = [patch_class(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    figure.savefig(output, dpi=130)


def _legend_name(track: Track, span: Span) -> str:
    if track.order == 0:
        return f"engine: {span.name}"
    if span.name.startswith(NEGOTIATE_PREFIX):
        return "negotiation"
    return "collective" if span.depth == 0 else span.name


def colour_of(name: str) -> str:
    """Return the colour of a name of the legend, which depends on nothing else."""
    if name in COLOURS:
        return COLOURS[name]
    number = zlib.crc32(name.encode())
    parts = colorsys.hls_to_rgb(number % 360 / 360, 0.35 + number // 360 % 3 / 10, 0.5)
    return "#" + "".join(f"{round(255 * part):02x}" for part in parts)


def _draw_track(
    axes: Any, index: int, track: Track, colours: dict[str, str], labelled: float
) -> None:
    """Draw bars, and add their colours; segments longer than `labelled` (ms) show their bytes."""
    for span in sorted(track.spans, key=lambda span: span.depth):
        height = 0.8 / (1 + span.depth) ** 0.8
        start, width = span.start / 1000, (span.end - span.start) / 1000
        name = _legend_name(track, span)
        colour = colours.setdefault(name, colour_of(name))
        axes.broken_barh([(start, width)], (index - height / 2, height), facecolors=colour)
        if span.bytes is not None and width > labelled:
            middle = start + width / 2
            style = {"fontsize": 6, "va": "center", "ha": "center", "clip_on": True}
            axes.text(middle, index, size(span.bytes), **style)
    ticks = [tick / 1000 for tick in track.ticks]
    axes.vlines(ticks, index - 0.4, index + 0.4, colors="#8a4b08", linewidth=0.8)


def _label(axes: Any, tracks: list[Track], left_out: int, title: str) -> None:
    names = [
        track.name
        if len(track.name) <= NAME_CHARACTERS
        else "…" + track.name[-NAME_CHARACTERS + 1 :]
        for track in tracks
    ]
    axes.set_yticks(range(len(tracks)), names, fontsize=7)
    axes.set_ylim(len(tracks) - 0.4, -0.6)
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    axes.set_xlabel("ms" + (f"   ({left_out} more tensors are not shown)" if left_out > 0 else ""))
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    axes.set_title(title, fontsize=10)
