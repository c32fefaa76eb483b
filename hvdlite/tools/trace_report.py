"""The report on an iteration trace: tables of text, notes and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdlite.common.iterations.rows import IterationRow
from hvdlite.common.segmentation.rules import TimedReduction
from hvdlite.tools.trace_advice import NEGLIGIBLE_TAIL, Advice, advise
from hvdlite.tools.trace_summary import Figure, Summary, summarize
from hvdlite.tools.typical_iteration import TypicalIteration, typical_iteration

MIB = 1 << 20
SCRIPT = "train.py"  # the placeholder for the user's script
NOT_SEEN = "-"
# When one rank is always the slowest, its computation exceeds the median by at least this share of
# the wait. With two ranks the share is a half, since the median lies between them.
SAME_RANK = 0.25
MEANINGS = {
    "iteration": "from the beginning of forward to the end of the step",
    "data": "between two iterations: loading data, and what else the loop does",
    "computation": "forward and backward",
    "forward": "until the model has its output",
    "tail": "from the end of backward to the end of the step, less the optimizer",
    "optimizer": "the optimizer's own step",
    "overlap": "share of the communication that backward hides",
}


class Table(NamedTuple):
    """A table of text; columns are figures except the first one, a name, and `texts`."""

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    texts: tuple[int, ...] = ()  # the indices of further columns with words

    def is_figure(self, column: int) -> bool:
        """Return whether a column has figures."""
        return column > 0 and column not in self.texts


class IterationReport(NamedTuple):
    """The content of the report, without its layout."""

    title: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]  # caveats of the tables and the advice
    advice: Advice
    command: str  # the command line to try; empty where nothing is proposed


def make_report(rows: Sequence[IterationRow]) -> IterationReport:
    """Return the report on at least one row."""
    summary, typical = summarize(rows), typical_iteration(rows)
    advice = advise_on(summary, typical)
    command = (
        f"hvdlite-run -np {summary.ranks} --segmentation {advice.segmentation} python {SCRIPT}"
        if advice.segmentation
        else ""
    )
    title = f"{summary.iterations} iterations of {summary.ranks} ranks"
    tables = (_phases(summary), _segments(summary))
    return IterationReport(title, tables, tuple(_notes(summary, typical)), advice, command)


def advise_on(summary: Summary, typical: TypicalIteration | None) -> Advice:
    """Return the advice for a typical iteration; None: the trace has no end of backward."""
    if typical is not None:
        return advise(*typical[:4])
    reductions = [
        TimedReduction(segment.start, segment.start, segment.bytes) for segment in summary.segments
    ]
    return advise(None, None, 0.0, reductions)


def _notes(summary: Summary, typical: TypicalIteration | None) -> Iterator[str]:
    if summary.alike < 1:
        yield (
            f"The segments are those of {summary.alike:.0%} of the rows, which have "
            f"{len(summary.segments)}; in the others gradients were fused in another way."
        )
    if typical is not None and typical.wait > NEGLIGIBLE_TAIL * typical.iteration_end:
        slower = summary.figures["computation"].more or 0.0
        hint = (
            "See which rank is slowest in computation."
            if slower > SAME_RANK * typical.wait
            else "Now one rank is late, now another: are there enough cores, and is nothing else "
            "running on them?"
        )
        yield (
            f"The last rank ends backward {duration(typical.wait)} after the first, and the rest "
            f"waits for it: no cut helps against that. {hint}"
        )


def _phases(summary: Summary) -> Table:
    rows = []
    for name, figure in summary.figures.items():
        show = percent if name == "overlap" else duration
        slowest = ("", "") if name == "overlap" else _slowest(figure)
        rows.append((name, show(figure.median), *slowest, MEANINGS[name]))
    head = ("phase", "median", "slowest rank", "slower by", "what it is")
    return Table("Phases of an iteration", head, rows, (4,))


def _segments(summary: Summary) -> Table:
    rows = [
        (
            str(k),
            duration(segment.start),
            duration(segment.duration.median),
            size(segment.bytes),
            f"{size(segment.bandwidth)}/s",
            *_slowest(segment.duration),
        )
        for k, segment in enumerate(summary.segments, 1)
    ]
    head = ("segment", "start", "duration", "bytes", "bandwidth", "slowest rank", "slower by")
    return Table("Segments: gradients that are reduced together", head, rows)


def _slowest(figure: Figure) -> tuple[str, str]:
    if figure.slowest_rank is None:
        return NOT_SEEN, NOT_SEEN
    return str(figure.slowest_rank), duration(figure.more)


def duration(seconds: float | None) -> str:
    """Return `seconds` in milliseconds, with three digits after the point."""
    return NOT_SEEN if seconds is None else f"{1000 * seconds:.3f} ms"


def percent(share: float | None) -> str:
    """Return `share` in whole percent."""
    return NOT_SEEN if share is None else f"{share:.0%}"


def size(nbytes: float) -> str:
    """Return `nbytes` in KiB or MiB."""
    return f"{nbytes / 1024:.1f} KiB" if nbytes < MIB else f"{nbytes / MIB:.1f} MiB"
