"""The report on an iteration trace: tables of text, notes and advice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hvdlite.common.iterations.rows import IterationRow
from hvdlite.common.segmentation.rules import (
    TimedReduction,
    byte_shares,
    idle_seconds,
    proposed_changes,
)
from hvdlite.tools.drawing import size
from hvdlite.tools.trace_summary import (
    Figure,
    Summary,
    TypicalIteration,
    summarize,
    typical_iteration,
)

# Advice on the split of gradients, from an iteration trace, in words.


# The share of the iteration below which communication after backward is not worth a change.
NEGLIGIBLE_TAIL = 0.03
# The share of backward in forward and backward, assumed where the end of forward was not seen.
BACKWARD_SHARE = 2 / 3


class Advice(NamedTuple):
    """The advice; without `percentages` no other split will help."""

    rule: int  # 1, 2 or 3; 0: none applies
    why: str
    percentages: tuple[float, ...] = ()  # of the bytes, segment by segment

    @property
    def segmentation(self) -> str:
        """The value of ``--segmentation``; empty where nothing is proposed."""
        values = ",".join(f"{share:g}" for share in self.percentages)
        return f"size:{values}" if values else ""


def advise(
    fp_end: float | None,
    bp_end: float | None,
    iteration_end: float,
    reductions: Sequence[TimedReduction],
) -> Advice:
    """Return the advice that would shorten the tail most.

    All times are seconds after the beginning of forward; None where they were not seen.
    `reductions` are those of one iteration in their order.
    """
    if not reductions:
        return Advice(0, "No gradients were reduced: there is nothing to cut.")
    if bp_end is None:
        return Advice(0, "The end of backward was not seen: tell it with backward_done().")
    last_end = reductions[-1].end
    if last_end - bp_end <= NEGLIGIBLE_TAIL * iteration_end:
        return Advice(
            0,
            f"Communication ends {_ms(max(last_end - bp_end, 0))} after backward, which is "
            f"{max(last_end - bp_end, 0) / iteration_end:.0%} of the iteration: there is nothing "
            "to gain by another cut.",
        )
    if fp_end is None:
        fp_end = (1 - BACKWARD_SHARE) * bp_end
    changes = proposed_changes(reductions, fp_end, bp_end)
    if not changes:
        return Advice(0, _why(0, fp_end, bp_end, reductions))
    best = changes[0]
    return Advice(best.rule, _why(best.rule, fp_end, bp_end, reductions), best.percentages)


def _why(rule: int, fp_end: float, bp_end: float, reductions: Sequence[TimedReduction]) -> str:
    """Return why a change of this rule helps, or for 0 why none does."""
    first, last = reductions[0], reductions[-1]
    if rule == 1:
        return (
            f"The first reduction ends {_ms(bp_end - first.end)} before backward does, and the "
            f"last, with {byte_shares(reductions)[-1]:g} % of the bytes, runs "
            f"{_ms(last.end - bp_end)} longer: move the last cut later, so that little is left for "
            "the end."
        )
    if rule == 2:
        return (
            f"The first reduction starts late, {_ms(first.start - fp_end)} into a backward of "
            f"{_ms(bp_end - fp_end)}, and ends after it: move the cut earlier, so that the first "
            "reduction hides behind backward."
        )
    if rule == 3 and len(reductions) == 1:
        return (
            f"All gradients are reduced together, for {_ms(last.end - last.start)} after backward: "
            "add a segment, so that most of them are reduced while backward still runs."
        )
    idle = _ms(idle_seconds(reductions, fp_end, bp_end))
    if rule == 3:
        return (
            f"Backward has room: no reduction runs during {idle} of it, and communication ends "
            f"{_ms(last.end - bp_end)} after it: add a segment."
        )
    return (
        f"Communication takes longer than there is to hide it behind: {_ms(last.end - bp_end)} are "
        f"left after backward, in which no reduction runs for only {idle}. No other cut will help "
        "much: send less (compression, more backward passes in a step), or use a faster network."
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


SCRIPT = "train.py"  # the placeholder for the user's script
NOT_SEEN = "-"
# A rank that is last in this share of the iterations is late for a cause of its own.
MOSTLY = 2 / 3
# What a rank may do longer than others, so that it comes to the end of backward after them. In the
# other phases a rank waits for the rest: who takes longest there is early, and not slow.
CAUSES = ("data", "computation", "optimizer")
WITH_WAIT = ("iteration", "tail", "overlap")
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
        return column > 0 and column not in self.texts


class IterationReport(NamedTuple):
    """The content of the report, without its layout."""

    title: str
    tables: tuple[Table, ...]
    notes: tuple[str, ...]  # caveats of the tables and the advice
    advice: Advice
    command: str  # the command line to try; empty where nothing is proposed


def make_report(rows: Sequence[IterationRow]) -> IterationReport:
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
        advice = advise(*typical[:4])
        after = typical.reductions[-1].end - typical.bp_end if typical.reductions else 0.0
        if advice.segmentation and typical.wait > after:
            return Advice(
                0,
                f"Ranks wait {_ms(typical.wait)} for the last one, which is longer than the "
                f"{_ms(after)} of communication after backward: see to that rank first.",
            )
        return advice
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
        yield (
            f"The last rank ends backward {duration(typical.wait)} after the first, and the rest "
            f"waits for it: no cut helps against that. {_who_is_last(summary, typical)}"
        )


def _who_is_last(summary: Summary, typical: TypicalIteration) -> str:
    """Return which rank is last in most iterations, and what it does longer than the fastest."""
    (rank, times), *others = typical.last_ranks.most_common(2)
    iterations = typical.last_ranks.total()
    often = f"rank {rank} is last in {times} of {iterations} iterations"
    if times < MOSTLY * iterations:
        often += "".join(f", rank {other} in {count}" for other, count in others)
        return (
            f"Now one rank is late, now another ({often}): are there enough cores, and is nothing "
            "else running on them?"
        )
    takes = {
        name: (medians[rank], min(medians.values()))
        for name in CAUSES
        if rank in (medians := summary.figures[name].medians)
    }
    name = max(takes, key=lambda name: takes[name][0] - takes[name][1])
    its, least = takes[name]
    if its - least < typical.wait / 2:
        return f"{often.capitalize()}, but no phase of it takes longer than that of the others."
    return (
        f"{often.capitalize()}: its {name} takes {duration(its)}, that of the fastest rank "
        f"{duration(least)} ({name}: {MEANINGS[name]})."
    )


def _phases(summary: Summary) -> Table:
    rows = []
    for name, figure in summary.figures.items():
        show = percent if name == "overlap" else duration
        slowest = ("", "") if name in WITH_WAIT else _slowest(figure)
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
    return NOT_SEEN if share is None else f"{share:.0%}"
