"""A picture of one iteration: the computation and the communication of every rank.

It needs matplotlib.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

from hvdlite.common.iterations.rows import IterationRow
from hvdlite.tools.drawing import check_suffix, load_matplotlib
from hvdlite.tools.trace_summary import median_iteration

MOST_RANKS = 16  # the most ranks in one picture
COLOURS = {
    "forward": "#9ec5e8",
    "backward": "#2f6db0",
    "forward and backward": "#5f97cc",
    "optimizer": "#c98a1b",
    "segment": "#3c9d6f",
    "segment, after backward": "#d1495b",
}
LABEL_SHARE = 0.02  # the share of the picture's width that a bar needs to get text


class Bar(NamedTuple):
    """A bar of the picture, in seconds of the common clock."""

    kind: str  # a key of COLOURS
    start: float
    end: float
    text: str = ""


def bars_of(row: IterationRow) -> tuple[list[Bar], list[Bar]]:
    """Return the bars of computation, and those of segments, divided where backward ends."""
    computation: list[Bar] = []
    if row.bp_end is not None and row.fp_end is not None:
        computation = [
            Bar("forward", row.fp_start, row.fp_end),
            Bar("backward", row.fp_end, row.bp_end),
        ]
    elif row.bp_end is not None:
        computation = [Bar("forward and backward", row.fp_start, row.bp_end)]
    if row.optimizer_time is not None:
        end = row.iteration_end
        computation.append(Bar("optimizer", end - row.optimizer_time, end))
    segments: list[Bar] = []
    border = row.iteration_end if row.bp_end is None else row.bp_end
    for k, (start, end, _) in enumerate(row.segments, 1):
        if start < border:
            segments.append(Bar("segment", start, min(end, border), str(k)))
        if end > border:
            segments.append(Bar("segment, after backward", max(start, border), end, str(k)))
    return computation, segments


def draw(rows: Sequence[IterationRow], output: str) -> None:
    """Draw an iteration of median length into the file `output`, ``.png`` or ``.svg``.

    Raises `ValueError` for another suffix, `ImportError` without matplotlib, and `OSError`.
    """
    check_suffix(output)
    make_figure(rows).savefig(output, dpi=130)


def svg(rows: Sequence[IterationRow]) -> str:
    """Return the picture as an SVG element, without the XML prologue of a file.

    Raises `ImportError` without matplotlib.
    """
    text = io.StringIO()
    make_figure(rows).savefig(text, format="svg")
    return text.getvalue()[text.getvalue().index("<svg") :]


def make_figure(rows: Sequence[IterationRow]) -> Any:
    """Return the figure; raise `ImportError` without matplotlib."""
    figure_class, patch_class = load_matplotlib("trace")
    chosen = median_iteration(rows)
    shown = chosen[:MOST_RANKS]
    lines = [(row.rank, bars) for row in shown for bars in bars_of(row)]
    figure = figure_class(figsize=(11, 1.4 + 0.34 * len(lines)), layout="constrained")
    axes = figure.add_subplot()
    begin = min(row.fp_start for row in shown)
    width = max(row.iteration_end for row in shown) - begin
    for index, (_, bars) in enumerate(lines):
        for bar in bars:
            _draw_bar(axes, index, bar, begin, LABEL_SHARE * width)
    for index, row in enumerate(shown):
        if row.bp_end is not None:
            axes.vlines(1000 * (row.bp_end - begin), 2 * index - 0.5, 2 * index + 1.5,
                        colors="#444444", linestyles="dotted", linewidth=0.9)  # fmt: skip
    names = [
        f"rank {row.rank}: {kind}" for row in shown for kind in ("computation", "communication")
    ]
    axes.set_yticks(range(len(lines)), names, fontsize=8)
    axes.set_ylim(len(lines) - 0.4, -0.6)
    hidden = len(chosen) - len(shown)
    axes.set_xlabel("ms" + (f"   ({hidden} more ranks are not shown)" if hidden else ""))
    axes.set_title(f"Iteration {shown[0].iteration}, as long as most are", fontsize=10)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(left=False)
    used = {bar.kind for _, bars in lines for bar in bars}
    patches = [patch_class(color=COLOURS[kind], label=kind) for kind in COLOURS if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


def _draw_bar(axes: Any, index: int, bar: Bar, begin: float, labelled: float) -> None:
    start, width = 1000 * (bar.start - begin), 1000 * (bar.end - bar.start)
    axes.broken_barh([(start, width)], (index - 0.4, 0.8), facecolors=COLOURS[bar.kind],
                     edgecolors="white", linewidth=0.4)  # fmt: skip
    if bar.text and bar.end - bar.start > labelled:
        axes.text(start + width / 2, index, bar.text, color="white", fontsize=7,
                  va="center", ha="center")  # fmt: skip
